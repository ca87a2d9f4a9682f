"""The description of a provider."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from dspark.providers.errors import ProviderError
from dspark.providers.session import ProfiledSession, Session

__all__ = ["Provider"]


@dataclass(frozen=True)
class Provider(ABC):
    """A family of devices that can run exported graphs.

    Attributes:
        name: What users write.
        aliases: Other spellings.
        precisions: Bundle precisions that it runs.
    """

    name: str
    aliases: tuple[str, ...]
    precisions: frozenset[str]

    def profile(self, model: Path, *, threads: int | None) -> ProfiledSession:
        """Loads a graph as ``open`` does, to tell where its time goes.

        Raises:
            ProviderError: As ``open``, or the provider cannot tell.
        """
        raise ProviderError(f"{self.name} does not tell where a graph's time goes")

    @abstractmethod
    def open(self, model: Path, *, threads: int | None) -> Session:
        """Loads a graph.

        Args:
            model: The graph's file; its weights lie beside it.
            threads: Host threads; None chooses one a core.

        Raises:
            ProviderError: The provider is not installed or cannot run the graph.
        """
