"""Which provider runs which graph: what users write after ``--provider``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dspark.providers.descriptions.cpu import CPU
from dspark.providers.errors import ProviderError
from dspark.providers.provider import Provider, suggestion
from dspark.providers.registry import find_provider

__all__ = ["GRAPHS", "ON_CPU", "Choice", "Selection"]

GRAPHS = ("target", "drafter", "head")
NEXT_OPTION = re.compile(r",(?=[A-Za-z_][\w.]*=)")
"""A comma before another option; values may have commas themselves."""


@dataclass(frozen=True)
class Choice:
    """A provider and its options."""

    provider: Provider
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The provider's name, and its options."""
        options = ",".join(f"{name}={value}" for name, value in sorted(self.options.items()))
        return f"{self.provider.name}:{options}" if options else self.provider.name

    @classmethod
    def parse(cls, text: str) -> "Choice":
        """Reads ``NAME`` or ``NAME:key=value,key=value``.

        Raises:
            ProviderError: The provider or an option is unknown, or the text has another form.
        """
        name, colon, rest = text.partition(":")
        provider = find_provider(name.strip())
        options: dict[str, str] = {}
        for part in NEXT_OPTION.split(rest) if colon else ():
            key, equals, value = part.partition("=")
            if not equals or not key.strip():
                raise ProviderError(f"{text}: {part!r} is no option; write {name}:key=value,key=value")
            options[key.strip()] = value.strip()
        provider.check_options(options)
        return cls(provider, options)


@dataclass(frozen=True)
class Selection:
    """What runs each graph: the first choice that can.

    Attributes:
        others: Choices of the graphs that have none of their own, the most wanted first.
        graphs: Choices of single graphs.
        allow_fallback: Whether nodes that a device cannot run may run on the host.
    """

    others: tuple[Choice, ...] = (Choice(CPU),)
    graphs: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)
    allow_fallback: bool = False

    @classmethod
    def of(cls, provider: Provider) -> "Selection":
        """One provider for all graphs."""
        return cls((Choice(provider),))

    @classmethod
    def parse(cls, texts: str | Sequence[str], *, allow_fallback: bool = False) -> "Selection":
        """Reads ``[GRAPH=]NAME[:key=value,…]`` once or several times.

        Texts without a graph, or for the same graph, are choices of which the first that can run it does. Graphs that
        no text is for run on the CPU.

        Raises:
            ProviderError: As ``Choice.parse``, or there is no such graph.
        """
        others: list[Choice] = []
        graphs: dict[str, tuple[Choice, ...]] = {}
        for text in [texts] if isinstance(texts, str) else texts:
            before, equals, rest = text.partition("=")
            if not equals or ":" in before:
                others.append(Choice.parse(text))
                continue
            graph = before.strip()
            if graph not in GRAPHS:
                known = ", ".join(GRAPHS)
                raise ProviderError(
                    f"{text}: there is no graph {graph!r}; there are: {known}.{suggestion(graph, GRAPHS)}"
                )
            graphs[graph] = (*graphs.get(graph, ()), Choice.parse(rest))
        return cls(tuple(others) or cls.others, graphs, allow_fallback)

    @property
    def label(self) -> str:
        """What measurements with it are filed under: the providers' names, and their options."""

        def names(choices: tuple[Choice, ...]) -> str:
            return " or ".join(choice.label for choice in choices)

        return ", ".join([names(self.others), *(f"{graph} {names(own)}" for graph, own in sorted(self.graphs.items()))])

    def device_name(self, graph: str) -> str | None:
        """Name of the device that a graph runs on: the first that is there; None if none is but the host."""
        names = (choice.provider.device_name(choice.options) for choice in self.choices(graph))
        return next(filter(None, names), None)

    def choices(self, graph: str) -> tuple[Choice, ...]:
        """The choices of a graph, the most wanted first."""
        return self.graphs.get(graph, self.others)


ON_CPU = Selection()
"""Every graph on the CPU provider."""
