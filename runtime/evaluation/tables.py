"""Evaluations and comparisons as tables of text, for the terminal and for the report."""

from collections.abc import Sequence
from typing import TypeAlias

from dspark.runtime.evaluation.evaluator import Counts, Evaluation
from dspark.runtime.evaluation.figures import Figures
from dspark.runtime.evaluation.quality_figures import Comparison, ComparisonResult
from dspark.runtime.reports.tables import ABSENT, TextTable

__all__ = ["comparison_tables", "evaluation_tables"]


Line: TypeAlias = tuple[str, Counts, Figures]
"""A dataset's name, counts and figures; for the macro average the counts of all together."""


def evaluation_tables(evaluation: Evaluation) -> list[TextTable]:
    """The tables: acceptance, speed, acceptance by position, confidence, and thresholds."""
    lines = [(name, result.counts, result.figures) for name, result in evaluation.datasets.items()]
    if len(lines) > 1:
        lines.append(("macro average", evaluation.pooled.counts, evaluation.macro_average))
    tables = [_acceptance(lines), _speed(lines), _positions(evaluation.drafter.draft_length, lines)]
    if evaluation.pooled.figures.confidence:
        tables.append(_confidence(evaluation))
    if evaluation.pooled.figures.sweep:
        tables.append(_sweep(evaluation))
    return tables


def comparison_tables(comparison: Comparison) -> list[TextTable]:
    """The tables: quality, and acceptance length if there is a drafter."""
    lines = list(comparison.datasets.items())
    if len(lines) > 1:
        lines.append(("all", comparison.pooled))
    tables = [_quality(f"{comparison.candidate.bundle} against {comparison.reference.bundle}", lines)]
    if comparison.pooled.acceptance:
        tables.append(_acceptance_lengths(lines))
    return tables


def _acceptance(lines: Sequence[Line]) -> TextTable:
    rows = []
    for name, counts, figures in lines:
        accepted, acceptance = f"{counts.accepted} of {counts.verified}", figures.acceptance
        row = [name, f"{counts.prompts}", f"{counts.rounds}", _number(acceptance.length), accepted]
        rows.append([*row, _percent(acceptance.rate)])
    columns = ["dataset", "prompts", "drafts", "acceptance length", "accepted", "rate"]
    return TextTable("Acceptance", columns, rows, summary=len(lines) > 1)


def _speed(lines: Sequence[Line]) -> TextTable:
    rows = []
    for name, _, figures in lines:
        speed = figures.speed
        row = [name, _number(speed.plain, 1), _number(speed.speculative, 1), _number(speed.speedup)]
        rows.append([*row, _percent(speed.identical_outputs)])
    columns = ["dataset", "plain", "speculative", "speed-up", "identical outputs"]
    return TextTable("Decoding speed, tokens per second", columns, rows, summary=len(lines) > 1)


def _positions(draft_length: int, lines: Sequence[Line]) -> TextTable:
    positions = [str(position) for position in range(1, draft_length + 1)]
    rows = [[name, *map(_percent, figures.acceptance.conditional)] for name, _, figures in lines]
    title = "Acceptance rate by position, where all earlier tokens were accepted"
    return TextTable(title, ["dataset", *positions], rows, summary=len(lines) > 1)


def _confidence(evaluation: Evaluation) -> TextTable:
    scalings = evaluation.pooled.figures.confidence
    columns, rows = ["position", "ROC-AUC"], []
    for scaling in scalings:
        columns += [f"{name}, {scaling}" for name in ("ECE", "Brier", "survival ECE")]
    for position in range(evaluation.drafter.draft_length):
        row = [str(position + 1), _number(scalings["raw"].roc_auc[position], 3)]
        for figures in scalings.values():
            row += [_percent(figures.ece[position]), _number(figures.brier[position], 3)]
            row += [_percent(figures.survival_ece[position])]
        rows.append(row)
    mean = ["mean", _number(scalings["raw"].mean_roc_auc, 3)]
    for figures in scalings.values():
        mean += [_percent(figures.mean_ece), _number(figures.mean_brier, 3), _percent(figures.mean_survival_ece)]
    return TextTable("Confidence by position, all datasets together", columns, [*rows, mean], summary=True)


def _sweep(evaluation: Evaluation) -> TextTable:
    sweep = evaluation.pooled.figures.sweep[evaluation.scaling]
    figures = zip(
        evaluation.thresholds, sweep.verified_per_round, sweep.acceptance_rate, sweep.acceptance_length, strict=True
    )
    rows = [
        [f"{threshold:.2f}", _number(verified), _percent(rate), _number(length)]
        for threshold, verified, rate, length in figures
    ]
    title = f"Drafts cut at a confidence threshold ({evaluation.scaling}), all datasets together"
    return TextTable(title, ["threshold", "verified per round", "acceptance rate", "acceptance length"], rows)


def _quality(title: str, lines: Sequence[tuple[str, ComparisonResult]]) -> TextTable:
    rows = []
    for name, result in lines:
        quality = result.quality
        row = [name, f"{quality.positions:,}", f"{quality.perplexity['candidate']:.3f}"]
        row += [f"{quality.perplexity['reference']:.3f}", f"{quality.perplexity_change:+.2%}"]
        rows.append([*row, f"{quality.top1_agreement:.2%}", f"{quality.mean_kl:.3g}", f"{quality.worst_kl:.3g}"])
    columns = ["dataset", "positions", "perplexity", "reference", "change", "top-1", "mean KL", "worst KL"]
    return TextTable(f"{title} (KL in nats)", columns, rows, summary=len(lines) > 1)


def _acceptance_lengths(lines: Sequence[tuple[str, ComparisonResult]]) -> TextTable:
    rows = []
    for name, result in lines:
        sides = (result.acceptance.get("candidate"), result.acceptance.get("reference"))
        rows.append([name, *(_number(figures.length if figures else None) for figures in sides)])
    return TextTable("Acceptance length", ["dataset", "candidate", "reference"], rows, summary=len(lines) > 1)


def _number(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1%}"
