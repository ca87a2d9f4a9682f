"""The description of a provider."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from dspark.providers.errors import ProviderError
from dspark.providers.monitors import DeviceLoad, DeviceMonitor
from dspark.providers.session import PlacedNode, ProfiledSession, Session, SessionLimits

__all__ = [
    "DEFAULT_LOADING",
    "NOTHING",
    "CompileOptions",
    "Discovery",
    "LoadOptions",
    "Options",
    "Provider",
    "suggestion",
]

Options: TypeAlias = Mapping[str, str]
"""A provider's own options, as users write them."""
NOTHING: Options = MappingProxyType({})


@dataclass(frozen=True)
class LoadOptions:
    """How a graph is loaded.

    Attributes:
        threads: Host threads; None chooses one per core.
        options: The provider's own options.
        dimensions: Values of the graph's symbolic dimensions that are fixed, which fixes its shapes.
        allow_fallback: Whether nodes that the device cannot run may run on the host.
    """

    threads: int | None = None
    options: Options = field(default_factory=dict)
    dimensions: Mapping[str, int] = field(default_factory=dict)
    allow_fallback: bool = False


DEFAULT_LOADING = LoadOptions()


@dataclass(frozen=True)
class CompileOptions:
    """How a graph is compiled ahead of time.

    Attributes:
        precision: Of the graph, in words, for the key of what is built.
        options: The provider's own options.
        shapes: Values of the symbolic dimensions, once for each shape that is compiled; without any they stay open.
        limits: The largest calls that the result must take where dimensions stay open. Limits of dimensions that the
            graph does not have are ignored.
        draft_tokens: Tokens of a draft, which kernels are tuned for; 0 without a drafter.
        content: The graph with some dimensions fixed; None: as it is in its file.
        on_phase: Called with every phase that begins, in words; perhaps from other threads.
    """

    precision: str
    options: Options = field(default_factory=dict)
    shapes: Sequence[Mapping[str, int]] = ()
    limits: SessionLimits = field(default_factory=SessionLimits)
    draft_tokens: int = 0
    content: bytes | None = None
    on_phase: Callable[[str], None] = lambda phase: None


@dataclass(frozen=True)
class Discovery:
    """What of a provider is there on this host.

    Attributes:
        devices: The devices that it would use.
        problem: Why it cannot be used, and what to do; None if it can.
    """

    devices: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Provider(ABC):
    """A family of devices that can run exported graphs.

    Attributes:
        name: What users write.
        aliases: Other spellings.
        precisions: Bundle precisions that it runs.
        cache_forms: Cache forms that it runs: whether its graphs can write into the cache.
        static_shapes: Whether it takes graphs of fixed shapes only.
        compiled_tables: Bundle precisions of embedding and LM head that it compiles; None: all of ``precisions``.
        compiles_ranges: Whether what it compiles takes calls up to ``CompileOptions.limits`` only.
        compiles_fixed_cache: Whether a cache that a graph writes in place must have one size in a graph that it
            compiles.
        options: Names of the options that it takes.
        install: What to install on a host that lacks it.
        monitor: Reads the load of its devices; None if they do not tell.
    """

    name: str
    aliases: tuple[str, ...] = ()
    precisions: frozenset[str]
    cache_forms: frozenset[str] = frozenset({"in-place", "delta"})
    static_shapes: bool = False
    compiled_tables: frozenset[str] | None = None
    compiles_ranges: bool = False
    compiles_fixed_cache: bool = False
    options: frozenset[str] = frozenset()
    install: str = ""
    monitor: DeviceMonitor | None = None

    def discover(self) -> Discovery:
        """Looks for the provider and its devices; never raises."""
        return Discovery()

    def device_name(self, options: Options = NOTHING) -> str | None:
        """Name of the device that graphs run on with these options; None if it is the host, or not there.

        Where the options do not say which of several devices it is, all are named. Never raises.
        """
        devices, index = self.discover().devices, options.get("device_id", "")
        if index.isdecimal() and int(index) < len(devices):
            devices = (devices[int(index)],)
        return ", ".join(dict.fromkeys(devices)) or None

    @abstractmethod
    def open(self, model: Path, how: LoadOptions = DEFAULT_LOADING) -> Session:
        """Loads a graph.

        Args:
            model: The graph's file; its weights lie beside it.
            how: How it is loaded.

        Raises:
            ProviderError: The provider is not installed, does not know an option, or cannot run the whole graph.
        """

    def profile(self, model: Path, how: LoadOptions = DEFAULT_LOADING) -> ProfiledSession:
        """Loads a graph as ``open`` does, to tell where its time goes.

        Raises:
            ProviderError: As ``open``, or the provider cannot tell.
        """
        raise ProviderError(f"{self.name} does not tell where a graph's time goes")

    def placement(self, model: Path, how: LoadOptions = DEFAULT_LOADING) -> Sequence[PlacedNode]:
        """Which node of a graph would run where, if nodes may fall back to the host.

        Raises:
            ProviderError: As ``open``, or the provider cannot tell.
        """
        raise ProviderError(f"{self.name} does not tell where a graph's nodes run")

    def require_compiler(self, options: Options = NOTHING) -> None:
        """Looks whether it can compile graphs ahead of time with these options.

        Raises:
            ProviderError: It is not installed, lacks the device that it compiles for, or does not compile.
        """
        raise ProviderError(f"{self.name} compiles nothing ahead of time")

    def compile(self, model: Path, how: CompileOptions) -> str:
        """Compiles a graph and writes the result, which ``open`` finds, into ``engines/`` of its bundle.

        A provider that compiles implements this and ``require_compiler``.

        Args:
            model: The graph's file; its weights lie beside it.
            how: How it is compiled.

        Returns:
            What was built, in words.

        Raises:
            ProviderError: As ``require_compiler``, or the graph cannot be compiled.
        """
        raise ProviderError(f"{self.name} compiles nothing ahead of time")

    @property
    def label(self) -> str:
        """What measurements with it are filed under."""
        return self.name

    def needs_static_shapes(self, options: Options) -> bool:
        """Whether, with these options, it takes graphs of fixed shapes only."""
        return self.static_shapes

    def load(self) -> Sequence[DeviceLoad]:
        """How busy its devices are, as far as they tell; never raises."""
        return () if self.monitor is None else self.monitor.read()

    def check_options(self, names: Iterable[str]) -> None:
        """Refuses options that the provider does not have.

        Raises:
            ProviderError: There is one; the message suggests the nearest.
        """
        for name in names:
            if name not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise ProviderError(
                    f"{self.name} has no option {name!r}; it has: {known}.{suggestion(name, self.options)}"
                )


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` Did you mean …?``, if one of the known names is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
