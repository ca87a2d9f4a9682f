"""Slots: running requests stay side by side in the cache, each with its own rows, whoever leaves."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dspark.runtime import NumericalError, ProviderError, SamplingParams
from dspark.runtime.bundle.manifest import CacheInfo
from dspark.runtime.cache.key_value_cache import TARGET, KeyValueCache
from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.engine.request import Request
from dspark.runtime.engine.slots import Slots

INFO = CacheInfo(layers=1, kv_heads=1, head_dim=2)


def rows(*values: float) -> np.ndarray:
    """A row per value, filled with it: ``[1, 2, 1, n, 2]``."""
    return np.broadcast_to(np.array(values, np.float32)[:, None], (1, 2, 1, len(values), 2)).copy()


class Follower:
    """A drafter that remembers which request each slot belongs to, as told."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.moves: list[tuple[int, int]] = []
        self.committed: list[tuple[int, list[int]]] = []

    def begin(self, slot: int) -> None:
        self.begun.append(slot)

    def commit(self, slot: int, verification: object, index: int, following: Sequence[int]) -> None:
        self.committed.append((slot, list(following)))

    def move(self, slot: int, source: int) -> None:
        self.moves.append((slot, source))


class Writer:
    """A target whose every committed token adds a row with the slot's value."""

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache

    def commit(self, slot: int, verification: Any, index: int, count: int) -> None:
        self.cache.append(TARGET, slot, rows(*[verification] * count))


class Table:
    """Slots of a small cache, and what the rows in it should be."""

    def __init__(self, slots: int = 4) -> None:
        self.cache = KeyValueCache([INFO], slots)
        self.drafter = Follower()
        drafter: Any = self.drafter
        target: Any = Writer(self.cache)
        self.slots = Slots(target, self.cache, drafter)
        self.values: dict[Request, list[float]] = {}

    def enter(self, value: float, count: int, *, join: bool = True, **options: Any) -> Request:
        """A request whose prompt took ``count`` rows of a value."""
        request = Request([0], Sampler(SamplingParams(), [0], 4), frozenset(), None, **options)
        self.slots.begin(request)
        verification: Any = value
        self.slots.commit(len(self.slots.running), verification, 0, [0] * count)
        self.values[request] = [value] * count
        if join:
            self.slots.join()
        return request

    def assert_holds(self) -> None:
        """The running requests' slots hold their own rows; nobody else's are left."""
        everyone = [*self.slots.running, *([self.slots.prefilling] if self.slots.prefilling else [])]
        ((keys, _),) = self.cache.layers(TARGET, slice(0, self.cache.lengths.shape[1]))
        for slot in range(len(keys)):
            expected = self.values[everyone[slot]] if slot < len(everyone) else []
            assert self.cache.lengths[TARGET, slot] == len(expected)
            assert keys[slot, 0, : len(expected), 0].tolist() == expected
            assert not keys[slot, 0, len(expected) :].any()


@pytest.mark.parametrize("prefilling", [False, True])
@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_who_leaves_is_followed_by_the_last(leaving: int, prefilling: bool) -> None:
    table = Table()
    first, second, third = (table.enter(value, count) for value, count in ((1.0, 3), (2.0, 5), (3.0, 1)))
    if prefilling:
        table.enter(4.0, 2, join=False)
    table.slots.leave([first, second, third][leaving])
    assert table.slots.running == [[third, second], [first, third], [first, second]][leaving]
    table.assert_holds()
    expected = [] if leaving == 2 else [(leaving, 2)]
    assert table.drafter.moves == (expected if not prefilling else [*expected, (2, 3)])
    table.enter(5.0, 4)
    table.assert_holds()


def test_everyone_who_ended_leaves_at_once() -> None:
    table = Table()
    requests = [table.enter(float(value), value) for value in (1, 2, 3, 4)]
    for request in requests[::3]:
        request.cancel()
    table.slots.leave_ended(list(requests))
    assert set(table.slots.running) == {*requests[1:3]}
    table.assert_holds()


def test_a_request_that_ended_in_prefill_never_runs() -> None:
    table = Table()
    table.enter(1.0, 2)
    table.enter(2.0, 2, join=False).cancel()
    table.slots.join()
    assert len(table.slots.running) == 1
    assert table.slots.prefilling is None
    table.assert_holds()


def test_a_kept_cache_begins_the_next_request() -> None:
    table = Table()
    request = table.enter(1.0, 3, keep_cache=True)
    table.enter(2.0, 1)
    table.slots.leave(request)
    assert request.cache is not None
    again = table.enter(1.0, 2, prefix=request.cache)
    table.values[again] = [1.0] * 5
    table.assert_holds()
    assert table.drafter.begun == [0, 1, 1]
    assert table.drafter.committed[-1] == (1, [0, 0])


def test_the_cache_of_a_request_that_failed_is_not_kept() -> None:
    table = Table()
    request = table.enter(1.0, 3, keep_cache=True)
    table.slots.fail(0, request, NumericalError("logit 3 is nan"))
    table.slots.leave(request)
    assert request.cache is None
    assert request.completion().error == "logit 3 is nan"


def test_a_failure_leaves_nothing_in_the_cache_that_is_not_finite() -> None:
    table = Table()
    request = table.enter(1.0, 3)
    ((keys, values),) = table.cache.layers(TARGET, slice(0, 1))
    keys[0, :, 3:5] = np.nan
    values[0, :, 4] = np.inf
    table.slots.fail(0, request, NumericalError("logit 3 is nan"))
    table.assert_holds()
    assert np.isfinite(values).all()


def test_an_error_that_is_not_ours_is_told_in_one_line_and_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()
    request = table.enter(1.0, 1)
    with caplog.at_level(logging.ERROR):
        table.slots.fail(0, request, IndexError("far\nout"))
    assert type(request.failure) is ProviderError
    assert request.completion().error == "a graph call failed: IndexError: far out"
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], IndexError)
