"""ECE, ROC-AUC and Brier score against what they are defined to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dspark.runtime.evaluation.metrics import BINS, brier_score, expected_calibration_error, reliability, roc_auc

Predictions = list[tuple[float, bool]]
predictions = st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60)
coarse = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.booleans()), max_size=60)  # many ties


def columns(pairs: Predictions) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    return np.array([p for p, _ in pairs], np.float64), np.array([y for _, y in pairs], np.bool_)


def test_ece_by_hand() -> None:
    """Bins of a fifteenth: {0.05, 0.05}, {0.5}, {1}."""
    error = expected_calibration_error(*columns([(0.05, False), (0.05, True), (0.5, True), (1.0, True)]))
    assert error == pytest.approx(2 / 4 * (0.5 - 0.05) + 1 / 4 * (1 - 0.5) + 0)


@given(predictions)
def test_ece_equals_brute_force(pairs: Predictions) -> None:
    bins: dict[int, Predictions] = {}
    for probability, outcome in pairs:
        bins.setdefault(min(int(probability * BINS), BINS - 1), []).append((probability, outcome))
    expected = sum(
        len(members) / len(pairs) * abs(np.mean([p for p, _ in members]) - np.mean([y for _, y in members]))
        for members in bins.values()
    )
    error = expected_calibration_error(*columns(pairs))
    assert error == (pytest.approx(expected) if pairs else None)
    curve = reliability(*columns(pairs))
    assert curve.count.tolist() == [len(bins.get(index, [])) for index in range(BINS)]
    for index, members in bins.items():
        assert curve.predicted[index] == pytest.approx(np.mean([p for p, _ in members]))
        assert curve.observed[index] == pytest.approx(np.mean([y for _, y in members]))
    assert np.isnan(curve.predicted).sum() == np.isnan(curve.observed).sum() == BINS - len(bins)


@given(st.one_of(predictions, coarse))
def test_roc_auc_counts_pairs(pairs: Predictions) -> None:
    positives = [score for score, outcome in pairs if outcome]
    negatives = [score for score, outcome in pairs if not outcome]
    auc = roc_auc(*columns(pairs))
    if not positives or not negatives:
        assert auc is None
        return
    wins = sum((high > low) + (high == low) / 2 for high in positives for low in negatives)
    assert auc == pytest.approx(wins / (len(positives) * len(negatives)))


def test_roc_auc_of_the_extremes() -> None:
    assert roc_auc(*columns([(0.1, False), (0.2, False), (0.3, True)])) == 1
    assert roc_auc(*columns([(0.1, True), (0.2, True), (0.3, False)])) == 0
    assert roc_auc(*columns([(0.5, True), (0.5, True), (0.5, False)])) == 0.5


def test_brier_score_by_hand() -> None:
    assert brier_score(*columns([(0.2, False), (0.9, True), (1.0, False)])) == pytest.approx((0.04 + 0.01 + 1) / 3)
    assert brier_score(*columns([])) is None
