"""Graph calls that stay bound to their buffers from one step to the next."""

from collections.abc import Callable
from typing import Generic, TypeVar

from dspark.runtime.cache import KeyValueCache

__all__ = ["BoundCalls"]

T = TypeVar("T")
KEPT = 32
"""Shapes kept; a request alone needs one for each number of verified tokens."""


class BoundCalls(Generic[T]):
    """The latest used bound calls, by shape; all are dropped when the cache they read is reallocated.

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
        call = self._calls.pop(shape, None) or self._bind(*shape)
        self._calls[shape] = call  # last in the dictionary: the latest used
        if len(self._calls) > KEPT:
            del self._calls[next(iter(self._calls))]
        return call
