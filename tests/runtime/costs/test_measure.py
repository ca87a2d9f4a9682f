"""Measuring costs: which steps, and what their times say."""

from pathlib import Path

import numpy as np
import pytest

from dspark.runtime import Bundle
from dspark.runtime.costs import measure as measuring
from dspark.runtime.costs.measure import Grid, brief_grid, full_grid, measure, outliers
from dspark.runtime.costs.model import CostModel
from tests.runtime.costs.curves import even_steps
from tests.support.costs import key_of
from tests.support.golden_models import Arrays, tampered_sessions


def test_what_is_measured_is_what_calls_take(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only graph calls move."""
    now = 0.0

    def take_time(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        nonlocal now
        if graph == "target":
            slow = 1000 if len(takes) == 17 else 0  # once
            takes.append((inputs["pad_index"].shape[0], len(inputs["input_ids"])))
            requests, tokens = takes[-1]
            now += 10 + tokens + 0.01 * requests * inputs["past.0.key"].shape[2] + slow
        else:
            if graph == "drafter":
                now += 2.0 + 0.001 * inputs["context.0.key"].shape[2]
            assert graph == "head" or inputs["context.0.key"][:, :, :100].all()  # as it takes time to read a full cache

    takes: list[tuple[int, int]] = []
    monkeypatch.setattr(measuring, "perf_counter", lambda: now)
    bundle = Bundle.open(copied)
    grid = Grid(requests=(1, 3), tokens=(1, 2, 6), repeats=5)
    profile = measure(bundle, tampered_sessions(bundle, take_time), grid)
    assert {shape.tokens for shape in profile.steps} == {1, 2, 6}
    assert {(shape.requests, shape.context_length) for shape in profile.steps} == {(1, 128), (3, 128), (1, 512)}
    for shape, times in profile.steps.items():
        tokens, requests = shape.requests * shape.tokens, shape.requests
        expected = 10 + tokens + 0.01 * requests * shape.context_length
        assert sorted(times)[: len(times) // 2 + 1] == pytest.approx([expected] * (len(times) // 2 + 1))
    expected_drafts = {(128, 1): 2.128, (128, 3): 2.128, (512, 1): 2.512}
    assert {place: pytest.approx([time] * 5) for place, time in expected_drafts.items()} == profile.drafts
    table = profile.table(key_of(copied))
    assert table.max_batch_tokens == 18
    seconds = even_steps(table, 2, 320, 10)
    np.testing.assert_allclose(seconds, 10 + np.arange(2, 13) + 0.01 * 2 * 320)
    assert CostModel(table).draft_seconds(2, 320) == pytest.approx(2.128 + 0.001 * 2 * (320 - 128))
    assert max(time for times in profile.steps.values() for time in outliers(times)) > 1000


def test_grids() -> None:
    assert full_grid(8, 7, 11) == Grid((1, 2, 4, 8), (1, 2, 3, 4, 5, 6, 7, 8), 11)
    assert full_grid(6, 15, 3).requests == (1, 2, 4, 6)
    assert full_grid(1, 15, 3).tokens == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    assert brief_grid(1, 1).tokens == (1, 2)
    for requests, length in ((1, 1), (2, 2), (8, 7), (64, 15)):
        for grid in (full_grid(requests, length, 3), brief_grid(requests, length)):
            assert (grid.requests[0], grid.requests[-1]) == (1, requests)
            assert (grid.tokens[0], grid.tokens[-1]) == (1, length + 1)


def test_outliers() -> None:
    assert outliers([1.0]) == []
    assert outliers([1.0, 1.1, 0.9, 1.05, 0.95, 3.0]) == [3.0]
