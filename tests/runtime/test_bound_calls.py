"""Which bound calls are kept."""

import numpy as np

from dspark.runtime.bound_calls import KEPT, BoundCalls
from dspark.runtime.bundle import CacheInfo
from dspark.runtime.cache import KeyValueCache


class Log:
    """Notes the shapes that are bound, each to an object of its own."""

    def __init__(self) -> None:
        self.bound: list[tuple[int, ...]] = []

    def __call__(self, *shape: int) -> object:
        self.bound.append(shape)
        return object()


def test_a_shape_is_bound_once() -> None:
    log = Log()
    calls = BoundCalls(KeyValueCache([CacheInfo(layers=1, kv_heads=1, head_dim=1)], 1), log)
    first = calls.get(1, 2)
    assert calls.get(1, 2) is first
    assert calls.get(2, 1) is not first
    assert log.bound == [(1, 2), (2, 1)]


def test_the_latest_used_are_kept_and_no_more() -> None:
    log = Log()
    calls = BoundCalls(KeyValueCache([CacheInfo(layers=1, kv_heads=1, head_dim=1)], 1), log)
    for shape in range(KEPT + 5):
        calls.get(shape)
        calls.get(0)  # used again and again
    log.bound.clear()
    for shape in (0, *range(6, KEPT + 5)):
        calls.get(shape)
    assert log.bound == []
    calls.get(5)
    assert log.bound == [(5,)]


def test_all_are_bound_anew_when_the_cache_has_other_arrays() -> None:
    log = Log()
    cache = KeyValueCache([CacheInfo(layers=1, kv_heads=1, head_dim=1)], 1)
    calls = BoundCalls(cache, log)
    before = calls.get(3)
    cache.append(0, 0, np.ones((1, 2, 1, cache.capacity, 1), np.float32))
    assert calls.get(3) is before
    cache.append(0, 0, np.ones((1, 2, 1, 1, 1), np.float32))
    assert calls.get(3) is not before
    assert log.bound == [(3,), (3,)]
