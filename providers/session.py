"""What the runtime needs of a loaded graph, whatever runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = [
    "Buffer",
    "Call",
    "DeviceArray",
    "DeviceSession",
    "Index",
    "LimitedSession",
    "NodeTime",
    "PlacedNode",
    "ProfiledSession",
    "Session",
    "SessionLimits",
    "limits_of",
]


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
class SessionLimits:
    """The largest calls that a session takes, in symbols of ARCHITECTURE.md, "The graphs"; None: any.

    Attributes:
        requests: Requests of a call (B).
        prompt_tokens: Tokens of a call of one request (T), for example a piece of a prompt.
        tokens_per_request: Tokens of each request in a call of several (T), for example an anchor and its draft.
        cache_tokens: Rows of the cache (S).
        fixed_cache: Whether the cache must have exactly as many rows.
    """

    requests: int | None = None
    prompt_tokens: int | None = None
    tokens_per_request: int | None = None
    cache_tokens: int | None = None
    fixed_cache: bool = False


@runtime_checkable
class LimitedSession(Session, Protocol):
    """A loaded graph that does not take calls of every size.

    Attributes:
        limits: The largest calls that it takes.
    """

    limits: SessionLimits


def limits_of(session: Session) -> SessionLimits:
    """The largest calls that a session takes: any, if it states no limits."""
    return session.limits if isinstance(session, LimitedSession) else SessionLimits()


class DeviceArray(Protocol):
    """An array in a device's memory. It is indexed as a NumPy array is, with integers and slices without steps.

    Attributes:
        shape: Its shape.
        dtype: Type of its elements.
        nbytes: Bytes of its elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int

    def __getitem__(self, index: "Index") -> "DeviceArray":
        """A part, which shares the memory."""

    def __setitem__(self, index: "Index", values: "Buffer | Literal[0]") -> None:
        """Overwrites a part with zeros, or with values of its shape and type from the host or the same device.

        Raises:
            ProviderError: The values do not fit, or the device failed.
        """

    def read(self) -> NDArray[Any]:
        """A copy on the host.

        Raises:
            ProviderError: The device failed.
        """


Buffer: TypeAlias = NDArray[Any] | DeviceArray
"""What a graph's input or output can be bound to."""

Index: TypeAlias = int | slice | tuple[int | slice, ...]


@runtime_checkable
class DeviceSession(LimitedSession, Protocol):
    """A loaded graph on a device with memory of its own, where what the host does not look at can stay.

    An output may be bound to the array that an input is bound to: a graph that writes its cache in place.
    """

    def device_array(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Allocates an array of zeros on the device.

        Raises:
            ProviderError: The device's memory is full.
        """

    def bind(self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> Call:
        """As ``Session.bind``; host arrays are copied at every run, contiguous device arrays are used where they lie.

        Raises:
            ProviderError: The graph has no such input or output, or an array does not fit it.
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


@dataclass(frozen=True)
class PlacedNode:
    """Where one node of a graph runs.

    Attributes:
        name: The node's name.
        operator: What it computes.
        provider: ONNX Runtime's name of the provider that runs it.
    """

    name: str
    operator: str
    provider: str


class ProfiledSession(Session, Protocol):
    """A loaded graph that writes down what its nodes cost."""

    def node_times(self) -> Sequence[NodeTime]:
        """Every run of every node so far; after that nothing is written down any more."""
