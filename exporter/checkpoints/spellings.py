"""Drafter settings that different trainers write in different places.

The same value can stand at top level, in a nested object, or under a prefixed name: ``block_size``,
``dspark_config.block_size``, ``dflash_config.block_size``, ``dspark_block_size``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dspark.exporter.errors import CheckpointError

__all__ = ["Spellings"]

Value = TypeVar("Value")

TYPE_NAMES = {int: "a whole number", bool: "true or false", str: "a text", list: "a list"}


@dataclass(frozen=True)
class Spellings:
    """Looks settings up wherever they may stand.

    Attributes:
        config: Content of ``config.json``.
        where: What to call it in messages.
        nested: Objects in it that settings may stand in.
        prefix: What their names may begin with; empty for nothing.
    """

    config: Mapping[str, Any]
    where: str
    nested: tuple[str, ...] = ("dspark_config", "dflash_config")
    prefix: str = "dspark_"

    def find(self, kind: type[Value], *names: str) -> Value | None:
        """The value of a setting, or None where no spelling has one.

        Args:
            kind: Its type.
            names: What trainers call it.

        Raises:
            CheckpointError: If two spellings contradict each other, or the value is of another type.
        """
        found = self._all(names)
        for spelling, value in found.items():
            if type(value) is not kind:
                raise CheckpointError(f"{self.where}: {spelling} = {value!r}; {TYPE_NAMES[kind]} is needed.")
        first, *others = found or [""]
        for other in others:
            if found[other] != found[first]:
                raise CheckpointError(
                    f"{self.where}: {first} = {found[first]!r} contradicts {other} = {found[other]!r}."
                )
        return found.get(first)

    def require(self, kind: type[Value], *names: str) -> Value:
        """As ``find``, for a setting that must be there.

        Raises:
            CheckpointError: If it is missing, too.
        """
        value = self.find(kind, *names)
        if value is None:
            raise CheckpointError(f"{self.where} lacks {names[0]}.")
        return value

    def refuse(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses settings that change what a drafter computes in a way that is not supported.

        Args:
            neutral: For each the values that change nothing.

        Raises:
            CheckpointError: Names the first that has another value.
        """
        for name, harmless in neutral.items():
            for spelling, value in self._all((name,)).items():
                if value not in harmless:
                    raise CheckpointError(f"{self.where}: {spelling} = {value!r} is not supported.")

    def _all(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Spellings that have a value; null counts as none."""
        places: dict[str, Mapping[str, Any]] = {"": self.config}
        for place in self.nested:
            content = self.config.get(place) or {}
            if not isinstance(content, Mapping):
                raise CheckpointError(f"{self.where}: {place} = {content!r}; an object is needed.")
            places[f"{place}."] = content
        keys = dict.fromkeys(key for name in names for key in (name, f"{self.prefix}{name}"))
        return {
            f"{place}{key}": content[key]
            for place, content in places.items()
            for key in keys
            if content.get(key) is not None
        }
