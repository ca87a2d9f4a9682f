"""The key of what was compiled ahead of time: it lies beside it and says where that may run."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dspark.providers.errors import ProviderError
from dspark.providers.session import SessionLimits

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
    def limits(self) -> SessionLimits:
        """The largest calls that some profile allows; a symbol that no profile has may have any value."""
        requests = self._most("B", self.profiles)
        wide = [name for name, ranges in self.profiles.items() if "B" not in ranges or ranges["B"][2] == requests]
        cached = [ranges["S"] for ranges in self.profiles.values() if "S" in ranges]
        return SessionLimits(
            requests=requests,
            prompt_tokens=self._most("T", self.profiles),
            tokens_per_request=self._most("T", wide),
            cache_tokens=self._most("S", self.profiles),
            fixed_cache=any(low == high for low, _, high in cached),
        )

    def _most(self, symbol: str, names: Iterable[str]) -> int | None:
        """The largest value of a symbol in some profiles; None if it has no range there."""
        ranges = (self.profiles[name] for name in names)
        return max((each[symbol][2] for each in ranges if symbol in each), default=None)

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
