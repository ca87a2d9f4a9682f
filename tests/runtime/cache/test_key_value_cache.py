"""The cache against lists of rows."""

import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from dspark.providers.cuda.memory import Cuda
from dspark.runtime.bundle.manifest import CacheInfo
from dspark.runtime.cache.key_value_cache import REMEMBERED, TOKEN_STEP, KeyValueCache
from tests.support import fake_cuda

GROUPS = (CacheInfo(layers=2, kv_heads=1, head_dim=3), CacheInfo(layers=1, kv_heads=2, head_dim=2))
SLOTS = 3

groups = st.integers(0, len(GROUPS) - 1)
slots = st.integers(0, SLOTS - 1)


def rows(group: int, first: float, count: int) -> np.ndarray:
    """Distinct rows ``[layers, 2, kv_heads, count, head_dim]``, none of which has a zero."""
    info = GROUPS[group]
    shape = (info.layers, 2, info.kv_heads, count, info.head_dim)
    return (first + np.arange(np.prod(shape)).reshape(shape) / 1000).astype(np.float32)


def stacked(cache: KeyValueCache, group: int) -> np.ndarray:
    """``[layers, 2, slots, kv_heads, capacity, head_dim]``, put together from what graphs read."""
    return np.array(
        [[on_host(part) for part in pair] for pair in cache.layers(group, slice(0, cache.lengths.shape[1]))]
    )


def on_host(array: Any) -> np.ndarray:
    """The content of an array on the host or on a device."""
    return array if isinstance(array, np.ndarray) else array.read()


def assert_holds(cache: KeyValueCache, expected: list[tuple[list, ...]]) -> None:
    """Every slot holds its rows, and zeros after them."""
    for group in range(len(GROUPS)):
        content = stacked(cache, group)
        for slot, held in enumerate(expected):
            length = len(held[group])
            assert cache.lengths[group, slot] == length
            assert not content[:, :, slot, :, length:].any()
            for token, row in enumerate(held[group]):
                assert np.array_equal(content[:, :, slot, :, token], row)


class CacheMachine(RuleBasedStateMachine):
    """A cache beside ``[slot][group]`` lists of rows ``[layers, 2, kv_heads, head_dim]``."""

    extracted = Bundle("extracted")

    def __init__(self) -> None:
        super().__init__()
        self.cache = self.make()
        self.expected: list[tuple[list, ...]] = [([], []) for _ in range(SLOTS)]
        self.written = 0

    def make(self) -> KeyValueCache:
        return KeyValueCache(GROUPS, SLOTS)

    @rule(group=groups, slot=slots, count=st.integers(0, 70))
    def append(self, group: int, slot: int, count: int) -> None:
        self.written += 1
        new = rows(group, self.written, count)
        self.cache.append(group, slot, new)
        self.expected[slot][group].extend(new[:, :, :, token] for token in range(count))

    @rule(slot=slots, tokens=st.integers(0, 150))
    def truncate(self, slot: int, tokens: int) -> None:
        self.cache.truncate(slot, tokens)
        self.expected[slot] = tuple(held[:tokens] for held in self.expected[slot])

    @rule(slot=slots, source=slots)
    def copy(self, slot: int, source: int) -> None:
        self.cache.copy(slot, self.cache, source)
        self.expected[slot] = tuple(list(held) for held in self.expected[source])

    @rule(tokens=st.integers(0, 400))
    def reserve(self, tokens: int) -> None:
        self.cache.reserve(tokens)
        assert self.cache.capacity >= tokens

    @rule(times=st.integers(1, 2 * REMEMBERED))
    def trim(self, times: int) -> None:
        for _ in range(times):
            self.cache.trim()
        assert self.cache.capacity >= self.cache.lengths.max()

    @rule(target=extracted, slot=slots)
    def extract(self, slot: int) -> tuple[KeyValueCache, tuple[list, ...]]:
        return self.cache.extract(slot), tuple(list(held) for held in self.expected[slot])

    @rule(slot=slots, source=extracted)
    def copy_from_another_cache(self, slot: int, source: tuple[KeyValueCache, tuple[list, ...]]) -> None:
        other, held = source
        assert_holds(other, [held])  # whatever happened to the slot it came from
        self.cache.copy(slot, other, 0)
        self.expected[slot] = tuple(list(each) for each in held)

    @invariant()
    def holds_what_was_appended(self) -> None:
        assert_holds(self.cache, self.expected)

    @invariant()
    def graphs_can_read_it_in_place(self) -> None:
        assert self.cache.capacity % TOKEN_STEP == 0
        for group, info in enumerate(GROUPS):
            layers = list(self.cache.layers(group, slice(1, SLOTS)))
            assert len(layers) == info.layers
            for array in (array for pair in layers for array in pair):
                assert array.shape == (SLOTS - 1, info.kv_heads, self.cache.capacity, info.head_dim)
                assert array.flags.c_contiguous if isinstance(array, np.ndarray) else array.contiguous


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestCache = CacheMachine.TestCase


class DeviceCacheMachine(CacheMachine):
    """The same on a device, which is the host's memory here."""

    def make(self) -> KeyValueCache:
        with pytest.MonkeyPatch.context() as monkeypatch:
            fake_cuda.install(monkeypatch)
            return KeyValueCache(GROUPS, SLOTS, Cuda().zeros)


DeviceCacheMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=20)
TestDeviceCache = DeviceCacheMachine.TestCase


def addresses(cache: KeyValueCache) -> list[int]:
    return [next(iter(cache.layers(group, slice(0, 1))))[0].ctypes.data for group in range(len(GROUPS))]


def test_the_version_tells_when_the_arrays_are_others() -> None:
    cache = KeyValueCache(GROUPS, SLOTS)
    seen = {cache.version: addresses(cache)}
    for count in range(300):
        cache.append(0, 1, rows(0, count, 1))
        cache.truncate(0, 1)
        assert seen.setdefault(cache.version, addresses(cache)) == addresses(cache)
    assert len(seen) > 1


def test_growing_takes_few_copies() -> None:
    cache = KeyValueCache(GROUPS, 1)
    for count in range(4000):
        cache.append(0, 0, rows(0, count, 1))
    assert cache.version <= 32
    assert cache.capacity < 4000 * 1.2


def request_of(cache: KeyValueCache, tokens: int) -> None:
    """A request of so many tokens comes and leaves."""
    cache.append(0, 0, rows(0, 1.0, tokens))
    cache.truncate(0, 0)
    cache.trim()


def test_what_no_request_needs_any_more_is_given_back() -> None:
    cache = KeyValueCache(GROUPS, SLOTS)
    cache.append(1, 2, rows(1, 1.0, 130))  # goes on running all the time
    request_of(cache, 1000)
    for _ in range(REMEMBERED - 1):
        request_of(cache, 50)
        assert cache.capacity == 1024
    request_of(cache, 50)
    assert cache.capacity == 192
    assert np.array_equal(stacked(cache, 1)[:, :, 2, :, :130], rows(1, 1.0, 130))
    for tokens in [192, 50] * 2 * REMEMBERED:
        request_of(cache, tokens)
        assert cache.capacity == 192


def test_more_than_half_of_the_capacity_is_not_given_back() -> None:
    cache = KeyValueCache(GROUPS, SLOTS)
    request_of(cache, 256)
    for _ in range(2 * REMEMBERED):
        request_of(cache, 129)
        assert cache.capacity == 256


def test_of_the_only_capacities_it_takes_the_smallest_that_fits() -> None:
    cache = KeyValueCache(GROUPS, SLOTS, capacities=(64, 256, 1024))
    request_of(cache, 300)
    for _ in range(REMEMBERED):
        request_of(cache, 200)
    assert cache.capacity == 256
    fixed = KeyValueCache(GROUPS, SLOTS, capacities=(1024,))
    for _ in range(2 * REMEMBERED):
        request_of(fixed, 1)
        assert (fixed.capacity, fixed.version) == (1024, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_slots_that_are_not_used_take_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    cache = KeyValueCache([CacheInfo(layers=8, kv_heads=8, head_dim=64)], 64)
    cache.append(0, 63, np.ones((8, 2, 8, 10, 64), np.float32))
    cache.reserve(1024)
    assert cache.nbytes >= 1 << 30
    assert resident() - before < 256 << 20  # pages are touched as a whole
