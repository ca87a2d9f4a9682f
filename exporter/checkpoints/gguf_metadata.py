"""Metadata of a GGUF file, read by type.

A file says itself of what type each value is, and writers err: every value is asked for by the type it must have.
"""

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, overload

from dspark.exporter.errors import CheckpointError

__all__ = ["GgufMetadata"]

Value = TypeVar("Value", str, int, float, bool)

TYPE_NAMES: dict[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


class GgufMetadata(Mapping[str, Any]):
    """Keys and values of a GGUF file.

    Args:
        where: The file, for messages.
        values: By key; arrays are lists. None counts as missing.
    """

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self._values = {key: value for key, value in values.items() if value is not None}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def find(self, kind: type[Value], key: str) -> Value | None: ...

    @overload
    def find(self, kind: type[Value], key: str, default: Value) -> Value: ...

    def find(self, kind: type[Value], key: str, default: Value | None = None) -> Value | None:
        """The value of a key, or ``default`` where the file has none.

        Raises:
            CheckpointError: It is of another type than ``kind``; a whole number is a ``float``, too.
        """
        if key not in self._values:
            return default
        return self._checked(kind, key, self._values[key])

    def find_all(self, kind: type[Value], key: str) -> list[Value]:
        """The values of an array, empty where the file has none.

        Raises:
            CheckpointError: It is no array, or one of other types than ``kind``.
        """
        values = self._values.get(key, [])
        if not isinstance(values, list):
            raise self._wrong(key, values, f"a list, each {TYPE_NAMES[kind]},")
        if all(type(value) is kind for value in values):  # a vocabulary, several times
            return values
        return [self._checked(kind, key, value) for value in values]

    def require_uniform(self, kind: type[Value], key: str, default: Value | None = None) -> Value:
        """A value that all layers share, given once or for each.

        Raises:
            CheckpointError: It is missing without a default, differs between layers, or is of another type.
        """
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.where} lacks the metadata key {key}.")
        if isinstance(value, list):
            if not value or any(other != value[0] for other in value):
                raise CheckpointError(f"{self.where}: {key} differs between layers ({value}), which is not supported.")
            value = value[0]
        return self._checked(kind, key, value)

    def _checked(self, kind: type[Value], key: str, value: Any) -> Value:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return kind(value)
        raise self._wrong(key, value, TYPE_NAMES[kind])

    def _wrong(self, key: str, value: Any, needed: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {key} is {reprlib.repr(value)} ({type(value).__name__}); {needed} is needed."
        )
