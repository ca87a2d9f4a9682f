"""The cache of keys and values of a batch, target and draft layers side by side.

Rows of rejected tokens do not count, so there is nothing to roll back.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.providers.session import Session, limits_of
from dspark.runtime.bundle.manifest import CacheInfo, Manifest
from dspark.runtime.cache.allocation import common_allocator, host_zeros

__all__ = ["DRAFT", "TARGET", "TOKEN_STEP", "KeyValueCache", "make_cache"]

TARGET, DRAFT = 0, 1
"""Groups of the cache."""

TOKEN_STEP = 64
"""Capacity grows in steps of this many tokens: the unused tail costs attention time, growing costs a copy."""

REMEMBERED = 16
"""Requests that left last; capacity that none of them needed is given back."""


class KeyValueCache:
    """Keys and values of some requests, one slot each, token t of a request at index t.

    A group holds layers of one shape as one array ``[layers, 2, slots, kv_heads, tokens, head_dim]``; a layer's keys
    of neighbouring slots are then contiguous, so graphs read and write them in place. Rows after a slot's tokens are
    masked but still enter the products, so they must be finite (0 · NaN): zeros, or what a rejected token left.

    The capacity is a multiple of ``TOKEN_STEP``: sums over keys, which run in steps of a vector's width, then do not
    depend on how far the cache has grown.

    Args:
        groups: Shapes of the groups, the target's first.
        slots: Requests it has room for; memory is touched only when they are used.
        allocate: Makes an array of zeros of a shape and type, for example ``DeviceSession.device_array``.
        capacities: The only capacities it may have, ascending; by default any.
        most: The largest capacity it may have; None: any.

    Attributes:
        lengths: Tokens of each slot, int64 ``[groups, slots]``.
        version: Changes when the arrays are reallocated, so that bound calls can be renewed.
    """

    def __init__(
        self,
        groups: Sequence[CacheInfo],
        slots: int,
        allocate: Callable[..., Any] = host_zeros,
        capacities: Sequence[int] | None = None,
        most: int | None = None,
    ) -> None:
        self._infos = tuple(groups)
        self._allocate = allocate
        self._capacities = capacities
        self._most = most
        self.lengths = np.zeros((len(self._infos), slots), np.int64)
        self._arrays = [self._zeros(info, self._capacity_for(1)) for info in self._infos]
        self._needed = deque([0], REMEMBERED)
        self.version = 0

    @property
    def capacity(self) -> int:
        """Tokens a slot has room for."""
        return int(self._arrays[0].shape[4])

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in self._arrays)

    def layers(self, group: int, slots: slice) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Keys and values ``[slots, kv_heads, capacity, head_dim]`` of each layer: contiguous views."""
        for layer in self._arrays[group]:
            yield layer[0, slots], layer[1, slots]

    def reserve(self, tokens: int) -> None:
        """Makes room for this many tokens in every slot."""
        self._needed[-1] = max(self._needed[-1], tokens)
        if tokens <= self.capacity:
            return
        least = tokens if self._capacities else max(tokens, self.capacity + self.capacity // 8)
        self._reallocate(self._capacity_for(least))

    def trim(self) -> None:
        """Gives up capacity, which costs memory and attention's time, when a request has left.

        It does so if the last requests needed half of it at most: then it seldom has to grow again.
        """
        fitting = self._capacity_for(max(1, *self._needed, int(self.lengths.max())))
        if len(self._needed) == REMEMBERED and 2 * fitting <= self.capacity:
            self._reallocate(fitting)
        self._needed.append(0)

    def append(self, group: int, slot: int, new: NDArray[np.float32]) -> None:
        """Appends the keys and values of committed tokens.

        Args:
            group: Index of the group.
            slot: The request's slot.
            new: ``[layers, 2, kv_heads, n, head_dim]``.
        """
        start = int(self.lengths[group, slot])
        stop = start + new.shape[3]
        self.reserve(stop)
        self._arrays[group][:, :, slot, :, start:stop] = new
        self.lengths[group, slot] = stop

    def advance(self, group: int, slot: int, count: int) -> None:
        """Counts rows that a graph has written behind the slot's tokens as the next ``count`` tokens."""
        self.lengths[group, slot] += count

    def clear_tail(self, slot: int) -> None:
        """Zeroes all rows behind a slot's tokens, where a graph may have written values that are not finite."""
        for array, used in zip(self._arrays, self.lengths[:, slot], strict=True):
            array[:, :, slot, :, used:] = 0

    def truncate(self, slot: int, tokens: int) -> None:
        """Forgets a slot's tokens from index ``tokens`` on."""
        for array, used in zip(self._arrays, self.lengths[:, slot], strict=True):
            array[:, :, slot, :, tokens:used] = 0
        np.minimum(self.lengths[:, slot], tokens, out=self.lengths[:, slot])

    def copy(self, slot: int, source: "KeyValueCache", source_slot: int) -> None:
        """Overwrites a slot with one of another cache, or of this one."""
        lengths = source.lengths[:, source_slot]
        self.reserve(int(lengths.max()))
        for array, origin, length, used in zip(
            self._arrays, source._arrays, lengths, self.lengths[:, slot], strict=True
        ):
            array[:, :, slot, :, :length] = origin[:, :, source_slot, :, :length]
            array[:, :, slot, :, length:used] = 0
        self.lengths[:, slot] = lengths

    def extract(self, slot: int) -> "KeyValueCache":
        """A copy of one slot as a cache of its own."""
        single = KeyValueCache(self._infos, 1, self._allocate)
        single.copy(0, self, slot)
        return single

    def _capacity_for(self, tokens: int) -> int:
        """The smallest capacity that so many tokens fit into."""
        if self._capacities is None:
            return min(-(-tokens // TOKEN_STEP) * TOKEN_STEP, self._most or sys.maxsize)
        return next(capacity for capacity in self._capacities if capacity >= tokens)

    def _reallocate(self, capacity: int) -> None:
        for group, info in enumerate(self._infos):
            old = self._arrays[group]
            self._arrays[group] = self._zeros(info, capacity)
            for slot in np.flatnonzero(self.lengths[group]):  # empty slots stay untouched memory
                used = self.lengths[group, slot]
                self._arrays[group][:, :, slot, :, :used] = old[:, :, slot, :, :used]
        self.version += 1

    def _zeros(self, info: CacheInfo, tokens: int) -> Any:
        return self._allocate((info.layers, 2, self.lengths.shape[1], info.kv_heads, tokens, info.head_dim), np.float32)


def make_cache(manifest: Manifest, sessions: Mapping[str, Session], slots: int) -> KeyValueCache:
    """A cache for a bundle's graphs: on the device, if all that read it run there.

    Args:
        manifest: The bundle's manifest.
        sessions: Its graphs.
        slots: Requests it has room for; a bundle of fixed shapes has its own number.
    """
    allocate = common_allocator([session for name, session in sessions.items() if name != "head"], host_zeros)
    shapes, limits = manifest.shapes, limits_of(sessions["target"])
    if shapes is not None:
        return KeyValueCache(manifest.caches, shapes.batch, allocate, shapes.capacities)
    if limits.fixed_cache and limits.cache_tokens is not None:
        return KeyValueCache(manifest.caches, slots, allocate, (limits.cache_tokens,))
    return KeyValueCache(manifest.caches, slots, allocate, most=limits.cache_tokens)
