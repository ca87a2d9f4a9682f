"""How good probabilities are: calibration error, ROC-AUC and Brier score."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BINS", "Reliability", "brier_score", "expected_calibration_error", "reliability", "roc_auc"]

BINS = 15
"""Bins of equal width on [0, 1] (Guo et al., arXiv:1706.04599)."""

Floats = NDArray[np.floating[Any]]
Outcomes = NDArray[np.bool_]


@dataclass(frozen=True)
class Reliability:
    """Predictions in ``BINS`` bins of equal width; the last one holds 1 itself.

    Attributes:
        count: Predictions, int64 ``[BINS]``.
        predicted: Their mean ``[BINS]``; NaN in an empty bin.
        observed: Share of them that came true ``[BINS]``; NaN in an empty bin.
    """

    count: NDArray[np.int64]
    predicted: NDArray[np.float64]
    observed: NDArray[np.float64]


def reliability(probability: Floats, outcome: Outcomes) -> Reliability:
    """Compares predicted with observed frequencies.

    Args:
        probability: ``[n]`` predictions from 0 to 1.
        outcome: ``[n]`` what came true.
    """
    count, predicted, observed = _binned(probability, outcome)
    with np.errstate(invalid="ignore"):
        return Reliability(count, predicted / count, observed / count)


def expected_calibration_error(probability: Floats, outcome: Outcomes) -> float | None:
    """ECE: the mean of |predicted − observed| over the bins, weighted by their predictions.

    Args:
        probability: ``[n]`` predictions from 0 to 1.
        outcome: ``[n]`` what came true.

    Returns:
        From 0 to 1; None without predictions.
    """
    if not len(probability):
        return None
    _, predicted, observed = _binned(probability, outcome)
    return float(np.abs(predicted - observed).sum() / len(probability))


def roc_auc(score: Floats, outcome: Outcomes) -> float | None:
    """Probability that something that came true has a higher score than something that did not; ties count half.

    Args:
        score: ``[n]`` in any unit.
        outcome: ``[n]`` what came true.

    Returns:
        From 0 to 1; None unless both outcomes occur.
    """
    positives = int(outcome.sum())
    negatives = len(outcome) - positives
    if not positives or not negatives:
        return None
    _, place, ties = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(ties) - (ties - 1) / 2  # Mann and Whitney: ranks count from 1, equal scores share theirs
    rank_sum = float(mean_rank[place][outcome].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def brier_score(probability: Floats, outcome: Outcomes) -> float | None:
    """Mean squared error of probabilities.

    Args:
        probability: ``[n]`` predictions from 0 to 1.
        outcome: ``[n]`` what came true.

    Returns:
        From 0 to 1; None without predictions.
    """
    return float(np.mean((probability.astype(np.float64) - outcome) ** 2)) if len(probability) else None


def _binned(
    probability: Floats, outcome: Outcomes
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Count, sum of predictions, and number of true outcomes of each bin."""
    bins = np.minimum((probability * BINS).astype(np.int64), BINS - 1)
    return (
        np.bincount(bins, minlength=BINS).astype(np.int64),
        np.bincount(bins, probability, BINS).astype(np.float64),
        np.bincount(bins, outcome, BINS).astype(np.float64),
    )
