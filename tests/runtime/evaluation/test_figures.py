"""Figures of acceptance and confidence, by hand and by brute force."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.runtime.bundle.calibration import confidences
from dspark.runtime.decoding.rounds import Round, RoundTable
from dspark.runtime.evaluation.figures import THRESHOLDS, acceptance_figures, confidence_figures, sweep_figures
from dspark.runtime.scheduling.scheduler import Batch, ThresholdScheduler

logits = st.floats(-4, 4, width=32)

drafts = st.lists(
    st.integers(0, 4).flatmap(lambda accepted: st.tuples(st.just(accepted), st.tuples(*[logits] * 4))), min_size=1
)


def whole_drafts(drafts: Sequence[tuple[int, Sequence[float]]]) -> RoundTable:
    rounds = [Round(4, accepted, False, np.array(values, np.float32)) for accepted, values in drafts]
    return RoundTable.of(rounds, 4, confidence=True)


@given(drafts, st.tuples(*[st.floats(0.1, 10)] * 4))
def test_the_sweep_cuts_as_the_scheduler_does(
    drafts: list[tuple[int, tuple[float, ...]]], temperatures: tuple[float, ...]
) -> None:
    table = whole_drafts(drafts)
    assert table.confidence is not None
    sweep = sweep_figures(table, np.array(temperatures))
    everything = Batch(np.full(len(drafts), 4), np.ones(len(drafts), bool), 64)
    for index, threshold in enumerate(THRESHOLDS):
        probability = confidences(table.confidence, np.array(temperatures, np.float32))
        kept = ThresholdScheduler(threshold).schedule(probability, everything).tolist()
        accepted = [min(length, most) for length, (most, _) in zip(kept, drafts, strict=True)]
        assert sweep.verified_per_round[index] == pytest.approx(fmean(kept))
        assert sweep.acceptance_length[index] == pytest.approx(1 + fmean(accepted))
        rate = sum(accepted) / sum(kept) if any(kept) else None
        assert sweep.acceptance_rate[index] == (None if rate is None else pytest.approx(rate))


def test_a_sweep_by_hand() -> None:
    """Confidences 0.9, 0.6 (both stand) and 0.7, 0.8 (rejected at once)."""
    table = RoundTable.of(
        [
            Round(2, 2, False, np.log(np.array([9, 1.5], np.float32))),
            Round(2, 0, False, np.log(np.array([7 / 3, 4], np.float32))),
        ],
        2,
        confidence=True,
    )
    sweep = sweep_figures(table, np.ones(2))
    found = dict(zip(THRESHOLDS, zip(sweep.verified_per_round, sweep.acceptance_rate, strict=True), strict=True))
    assert found[0.0] == found[0.55] == (2, 0.5)
    assert found[0.65] == (1.5, pytest.approx(1 / 3))
    assert found[0.75] == (0.5, 1)
    assert found[0.95] == (0, None)
    assert sweep.acceptance_length[THRESHOLDS.index(0.55)] == 2
    assert sweep.acceptance_length[THRESHOLDS.index(0.75)] == 1.5


def test_confidence_figures_by_hand() -> None:
    """Position 1: 0.8 stands, 0.4 stands, 0.6 falls; position 2, of the first two drafts: 0.9 stands, 0.5 falls."""
    table = RoundTable.of(
        [
            Round(2, 2, False, np.log(np.array([4, 9], np.float32))),
            Round(2, 1, False, np.log(np.array([2 / 3, 1], np.float32))),
            Round(2, 0, False, np.log(np.array([1.5, 9], np.float32))),
        ],
        2,
        confidence=True,
    )
    figures = confidence_figures(table, np.ones(2))
    assert figures.ece == pytest.approx([(0.2 + 0.6 + 0.6) / 3, (0.1 + 0.5) / 2], abs=1e-6)
    assert figures.roc_auc == [0.5, 1]
    assert figures.brier == pytest.approx([(0.04 + 0.36 + 0.36) / 3, (0.01 + 0.25) / 2], abs=1e-6)
    # Survivals 0.72 (stands), 0.2 and 0.54 (fall), each in a bin of its own.
    assert figures.survival_ece == pytest.approx([1.4 / 3, (0.28 + 0.2 + 0.54) / 3], abs=1e-6)
    assert figures.mean_survival_ece == pytest.approx(fmean([1.4 / 3, 1.02 / 3]), abs=1e-6)


def test_no_rounds_give_no_figures() -> None:
    acceptance = acceptance_figures(RoundTable.of([], 3, confidence=False))
    assert (acceptance.length, acceptance.rate, acceptance.conditional) == (None, None, [None] * 3)
    assert confidence_figures(RoundTable.of([], 3, confidence=True), np.ones(3)).mean_ece is None
