"""What recorded rounds say about a drafter and its confidence head."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dspark.runtime.bundle.calibration import confidences
from dspark.runtime.decoding.rounds import RoundTable
from dspark.runtime.evaluation.metrics import brier_score, expected_calibration_error, reliability, roc_auc
from dspark.runtime.evaluation.temperature_scaling import survival_errors

__all__ = [
    "THRESHOLDS",
    "AcceptanceFigures",
    "ConfidenceFigures",
    "Figures",
    "ReliabilityBins",
    "ReliabilityCurves",
    "Scaling",
    "SpeedFigures",
    "SweepFigures",
    "acceptance_figures",
    "confidence_figures",
    "macro_average",
    "reliability_curves",
    "sweep_figures",
]

THRESHOLDS = tuple(step / 20 for step in range(20))
"""Confidence thresholds that are compared."""

Scaling: TypeAlias = Literal["raw", "calibrated"]
"""Whether confidences are as the head gives them or scaled by the bundle's calibration."""

Figure: TypeAlias = float | None


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AcceptanceFigures(_Model):
    """How much of the drafts stands.

    Attributes:
        length: Acceptance length: one (the target's own token) and the accepted draft tokens of a drafting round.
        rate: Accepted of verified draft tokens.
        verified_per_round: Draft tokens verified a drafting round.
        conditional: Acceptance rate at each position of the drafts whose earlier tokens were all accepted.
    """

    length: Figure
    rate: Figure
    verified_per_round: Figure
    conditional: list[Figure]


class SpeedFigures(_Model):
    """Decoding speed without prefill, both ways measured in turn.

    Attributes:
        plain: Tokens per second, of all requests together.
        speculative: The same with speculation.
        speedup: Speculative over plain.
        identical_outputs: Share of the greedy requests for which both ways gave the same tokens.
    """

    plain: Figure
    speculative: Figure
    speedup: Figure
    identical_outputs: Figure


class ConfidenceFigures(_Model):
    """How good confidences are, by position.

    Attributes:
        ece: Expected calibration error of c_k against acceptance, where all earlier tokens were accepted.
        roc_auc: ROC-AUC of the same.
        brier: Brier score of the same.
        survival_ece: Expected calibration error of a_k = Π_{i≤k} c_i against the survival of the draft's first k
            tokens, over all drafts of which k were verified.
        mean_ece: Mean over the positions.
        mean_roc_auc: Mean over the positions.
        mean_brier: Mean over the positions.
        mean_survival_ece: Mean over the positions; what calibration lowers.
    """

    ece: list[Figure]
    roc_auc: list[Figure]
    brier: list[Figure]
    survival_ece: list[Figure]
    mean_ece: Figure
    mean_roc_auc: Figure
    mean_brier: Figure
    mean_survival_ece: Figure


class SweepFigures(_Model):
    """The recorded drafts cut before the first confidence below each of ``THRESHOLDS``.

    Attributes:
        verified_per_round: Draft tokens left per round.
        acceptance_rate: Accepted of these; None where none are left.
        acceptance_length: One and the accepted tokens of a round.
    """

    verified_per_round: list[Figure]
    acceptance_rate: list[Figure]
    acceptance_length: list[Figure]


class Figures(_Model):
    """All figures of a set of rounds; the last two are empty without a confidence head."""

    acceptance: AcceptanceFigures
    speed: SpeedFigures
    confidence: dict[Scaling, ConfidenceFigures]
    sweep: dict[Scaling, SweepFigures]


class ReliabilityBins(_Model):
    """Bins of equal width from 0 to 1: how many predictions each holds, their mean, and the share that came true."""

    count: list[int]
    predicted: list[Figure]
    observed: list[Figure]


class ReliabilityCurves(_Model):
    """All positions together: confidences where the earlier tokens were accepted, and survival probabilities."""

    confidence: ReliabilityBins
    survival: ReliabilityBins


def acceptance_figures(table: RoundTable) -> AcceptanceFigures:
    """Figures of the drafts as they were verified."""
    reached = table.reached.sum(axis=0)
    accepted = (table.reached & table.survived).sum(axis=0)
    return AcceptanceFigures(
        length=_ratio(len(table) + table.accepted.sum(), len(table)),
        rate=_ratio(table.accepted.sum(), table.verified.sum()),
        verified_per_round=_ratio(table.verified.sum(), len(table)),
        conditional=[_ratio(part, whole) for part, whole in zip(accepted, reached, strict=True)],
    )


def confidence_figures(table: RoundTable, temperatures: NDArray[np.float64]) -> ConfidenceFigures:
    """Figures of the confidences divided by temperatures ``[γ]``."""
    probability = _probabilities(table, temperatures)
    columns = [
        (probability[rows, position], table.survived[rows, position]) for position, rows in enumerate(table.reached.T)
    ]
    ece = [expected_calibration_error(*column) for column in columns]
    auc = [roc_auc(*column) for column in columns]
    brier = [brier_score(*column) for column in columns]
    survival_ece = survival_errors(table, temperatures)
    return ConfidenceFigures(
        ece=ece,
        roc_auc=auc,
        brier=brier,
        survival_ece=survival_ece,
        mean_ece=_mean(ece),
        mean_roc_auc=_mean(auc),
        mean_brier=_mean(brier),
        mean_survival_ece=_mean(survival_ece),
    )


def sweep_figures(table: RoundTable, temperatures: NDArray[np.float64]) -> SweepFigures:
    """Figures at each threshold of confidences divided by temperatures ``[γ]``, of whole drafts."""
    assert table.confidence is not None
    # In float32, as the scheduler compares them.
    lowest = np.minimum.accumulate(confidences(table.confidence, temperatures), axis=1)
    kept = [np.minimum((lowest >= threshold).sum(axis=1), table.verified) for threshold in THRESHOLDS]
    accepted = [np.minimum(lengths, table.accepted).sum() for lengths in kept]
    verified = [lengths.sum() for lengths in kept]
    return SweepFigures(
        verified_per_round=[_ratio(count, len(table)) for count in verified],
        acceptance_rate=[_ratio(part, whole) for part, whole in zip(accepted, verified, strict=True)],
        acceptance_length=[_ratio(len(table) + count, len(table)) for count in accepted],
    )


def reliability_curves(table: RoundTable, temperatures: NDArray[np.float64]) -> ReliabilityCurves:
    """Predicted against observed frequencies of confidences divided by temperatures ``[γ]``."""
    probability = _probabilities(table, temperatures)
    survival = np.cumprod(probability, axis=1, dtype=np.float64)
    return ReliabilityCurves(
        confidence=_bins(probability[table.reached], table.survived[table.reached]),
        survival=_bins(survival[table.observed], table.survived[table.observed]),
    )


def macro_average(figures: Sequence[Figures]) -> Figures:
    """The mean of every figure over datasets; a dataset that lacks a figure does not count for it."""
    return Figures.model_validate(_averaged([each.model_dump() for each in figures]))


def _averaged(trees: Sequence[Any]) -> Any:
    first = trees[0]
    if isinstance(first, Mapping):
        return {name: _averaged([tree[name] for tree in trees]) for name in first}
    if isinstance(first, list):
        return [_averaged(values) for values in zip(*trees, strict=True)]
    return _mean(trees)


def _probabilities(table: RoundTable, temperatures: NDArray[np.float64]) -> NDArray[np.float64]:
    assert table.confidence is not None
    return confidences(table.confidence.astype(np.float64), temperatures)


def _bins(probability: NDArray[np.float64], outcome: NDArray[np.bool_]) -> ReliabilityBins:
    curve = reliability(probability, outcome)
    return ReliabilityBins(
        count=curve.count.tolist(),
        predicted=[
            value if count else None for value, count in zip(curve.predicted.tolist(), curve.count, strict=True)
        ],
        observed=[value if count else None for value, count in zip(curve.observed.tolist(), curve.count, strict=True)],
    )


def _mean(values: Sequence[Figure]) -> Figure:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _ratio(part: float, whole: float) -> Figure:
    return float(part / whole) if whole else None
