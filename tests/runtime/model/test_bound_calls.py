"""Which bound calls are kept."""

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dspark.runtime import Bundle
from dspark.runtime.bundle.manifest import CacheInfo
from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.model import bound_calls
from dspark.runtime.model.block_drafter import BlockDrafter
from dspark.runtime.model.bound_calls import KEPT, KEPT_BYTES, BoundCalls
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.eagle3_drafter import Eagle3Drafter
from dspark.runtime.model.graphs import ModelGraphs


class Log:
    """Notes the shapes that are bound, each to an object of its own that holds so many bytes."""

    def __init__(self, nbytes: Callable[[int], int] = lambda _: 0) -> None:
        self.bound: list[tuple[int, ...]] = []
        self.nbytes = nbytes

    def __call__(self, *shape: int) -> SimpleNamespace:
        self.bound.append(shape)
        return SimpleNamespace(nbytes=self.nbytes(shape[0]))


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


def test_large_ones_make_room_for_others() -> None:
    third = KEPT_BYTES // 3
    log = Log(lambda shape: 2 * KEPT_BYTES if shape == 9 else third)
    calls = BoundCalls(KeyValueCache([CacheInfo(layers=1, kv_heads=1, head_dim=1)], 1), log)
    for shape in (1, 2, 3, 1, 4):  # three fit; the second is the one that was not used for longest
        calls.get(shape)
    assert log.bound == [(1,), (2,), (3,), (4,)]
    for shape in (3, 1, 4):
        calls.get(shape)
    assert log.bound == [(1,), (2,), (3,), (4,)]
    assert calls.get(9) is calls.get(9)  # larger than all may be together
    calls.get(4)
    assert log.bound == [(1,), (2,), (3,), (4,), (9,), (4,)]


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_buffers_are_counted(name: str, golden_bundle: Callable[..., Path]) -> None:
    """As tracemalloc counts them, in the form of cache whose steps hold the new rows as well."""
    bundle = Bundle.open(golden_bundle(name, "delta"))
    sessions = open_sessions(bundle, HostOptions(threads=1), list(bundle.manifest.precision))
    graphs = ModelGraphs.of(bundle, sessions, 64, PhaseClock())
    cache, target, drafter = graphs.cache, graphs.target, graphs.drafter
    cache.reserve(512)
    target._logits_rows(64 * 6)
    made: list[int] = []

    def counted(make: Callable[..., bound_calls.Held], *shape: int) -> None:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        call = make(*shape)
        after, _ = tracemalloc.get_traced_memory()
        assert call.nbytes == pytest.approx(after - before, rel=0.02)
        made.append(call.nbytes)

    tracemalloc.start()
    try:
        counted(target._bind, 0, 64, 6, 64 * 6, False)
        if isinstance(drafter, BlockDrafter):
            counted(drafter._bind, 64, True)
        elif isinstance(drafter, Eagle3Drafter):
            counted(drafter._bind, 0, 64, 6, True)
    finally:
        tracemalloc.stop()
    assert len(made) == 2
    assert min(made) > 500_000


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
