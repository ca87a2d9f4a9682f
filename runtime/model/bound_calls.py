"""Graph calls that stay bound to their buffers from one step to the next."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import NDArray

from dspark.runtime.cache.key_value_cache import KeyValueCache

__all__ = ["BoundCalls", "buffer_bytes"]

KEPT = 32
"""Shapes kept at most; a request alone needs one for each number of verified tokens."""
KEPT_BYTES = 1 << 30
"""Bytes that their buffers may have; calls of many requests with large vocabularies have hundreds of megabytes."""


class Held(Protocol):
    """A bound call with its buffers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are its own."""


T = TypeVar("T", bound=Held)


def buffer_bytes(*groups: Mapping[Any, NDArray[Any]]) -> int:
    """Bytes of some buffers."""
    return sum(array.nbytes for group in groups for array in group.values())


class BoundCalls(Generic[T]):
    """The latest used bound calls, by shape; all are dropped when the cache they read is reallocated.

    Their number and the bytes of their buffers are limited; the latest is kept in any case.

    Args:
        cache: The cache whose arrays the calls are bound to.
        bind: Makes the call for a shape.
    """

    def __init__(self, cache: KeyValueCache, bind: Callable[..., T]) -> None:
        self._cache = cache
        self._version = cache.version
        self._bind = bind
        self._calls: dict[tuple[int, ...], T] = {}

    def get(self, *shape: int) -> T:
        """The call for a shape, bound now if it is not kept."""
        if self._version != self._cache.version:
            self._calls.clear()
            self._version = self._cache.version
        call = self._calls.pop(shape, None)
        if call is None:
            call = self._bind(*shape)
            self._make_room(call)
        self._calls[shape] = call  # last in the dictionary: the latest used
        return call

    def _make_room(self, call: T) -> None:
        nbytes = call.nbytes + sum(each.nbytes for each in self._calls.values())
        while self._calls and (len(self._calls) >= KEPT or nbytes > KEPT_BYTES):
            nbytes -= self._calls.pop(next(iter(self._calls))).nbytes
