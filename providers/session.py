"""What the runtime needs of a loaded graph, whatever runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["Call", "NodeTime", "ProfiledSession", "Session"]


class Call(Protocol):
    """A graph bound to fixed buffers: it reads and writes the same arrays at every run."""

    def run(self) -> None:
        """Computes the outputs from the inputs' present content.

        Raises:
            ProviderError: The graph failed, for example because an array has not the shape it expects.
        """


class Session(Protocol):
    """A loaded graph."""

    def bind(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> Call:
        """Binds every input and the wanted outputs to contiguous arrays, which the call keeps.

        Raises:
            ProviderError: The graph has no such input or output.
        """


@dataclass(frozen=True)
class NodeTime:
    """One run of one node of a graph.

    Attributes:
        name: The node's name.
        operator: What it computes.
        seconds: Time it took.
    """

    name: str
    operator: str
    seconds: float


class ProfiledSession(Session, Protocol):
    """A loaded graph that writes down what its nodes cost."""

    def node_times(self) -> Sequence[NodeTime]:
        """Every run of every node so far; after that nothing is written down any more."""
