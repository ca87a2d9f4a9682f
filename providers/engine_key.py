"""The key of what was compiled ahead of time: it lies beside it and says where that may run."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dspark.providers.errors import ProviderError

__all__ = ["ENGINES", "EngineKey", "graph_hash"]

ENGINES = "engines"
"""Folder of a bundle that holds a folder for each device."""


@dataclass(frozen=True)
class EngineKey:
    """What an engine or a compiled model was built with.

    Attributes:
        backend: Name of the library.
        version: Its version.
        device: The device in words.
        graph: SHA-256 of the graph's file, which names its weights.
        precision: Of the graph, in words.
        layers: Layers of the parsed network; None where the library does not tell.
        profiles: For each profile the least, best and largest value of every symbol; others may have any.
    """

    backend: str
    version: str
    device: str
    graph: str
    precision: str
    layers: int | None
    profiles: Mapping[str, Mapping[str, Sequence[int]]]

    @property
    def cache_capacity(self) -> int | None:
        """Rows that a cache must have; None when there may be fewer."""
        low, _, high = next(iter(self.profiles.values())).get("S", (0, 0, 1))
        return high if low == high else None

    @classmethod
    def read(cls, file: Path) -> "EngineKey":
        """Reads a key.

        Raises:
            ProviderError: The file is no key.
        """
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProviderError(f"{file}: is no key of an engine: {error!r}") from error

    def write(self, file: Path) -> None:
        """Writes the key."""
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def check(self, engine: Path, here: Mapping[str, object], advice: str) -> None:
        """Refuses an engine that was built for something else.

        Args:
            engine: Its file, for the error.
            here: What must be equal: fields and their values.
            advice: What to do, for the error.

        Raises:
            ProviderError: A field differs; the message has both values.
        """
        for name, value in here.items():
            if getattr(self, name) != value:
                raise ProviderError(
                    f"{engine}: built for {name} {getattr(self, name)!r}, but here it is {value!r}; {advice}"
                )


def graph_hash(graph: Path) -> str:
    """SHA-256 of a graph's file."""
    return hashlib.sha256(graph.read_bytes()).hexdigest()
