"""What the runtime needs of a loaded graph, whatever runs it."""

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["Call", "Session"]


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
