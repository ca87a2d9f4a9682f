"""How far one bundle is from another: the figures of a comparison, and how they follow from scores."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dspark.runtime.bundle.manifest import DrafterInfo
from dspark.runtime.evaluation.figures import AcceptanceFigures

__all__ = [
    "BundleSummary",
    "Comparison",
    "ComparisonResult",
    "ComparisonSettings",
    "Floats",
    "PositionScores",
    "QualityFigures",
    "Side",
    "quality_figures",
    "score_positions",
]

Side: TypeAlias = Literal["reference", "candidate"]
Floats: TypeAlias = NDArray[np.float64]


class _Model(BaseModel):
    # A ruined candidate may have an infinite perplexity, which JSON has no number for.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class ComparisonSettings(_Model):
    """How a comparison was run; see ``dspark-run compare``."""

    temperature: float
    max_new_tokens: int
    samples: int | None
    seed: int
    threads: int | None
    providers: tuple[str, ...] = ("cpu",)
    allow_fallback: bool = False


class BundleSummary(_Model):
    """Which bundle was compared.

    Attributes:
        bundle: Name of its folder.
        target: Name of its target.
        drafter: Description of its drafter.
        precision: Precisions of each graph.
    """

    bundle: str
    target: str
    drafter: DrafterInfo | None
    precision: dict[str, str]


class QualityFigures(_Model):
    """How both bundles predict the same text.

    Attributes:
        positions: Tokens predicted.
        perplexity: exp of the mean negative log-likelihood of these tokens.
        perplexity_change: The candidate's perplexity over the reference's, minus 1.
        top1_agreement: Share of the positions at which both find the same token likeliest.
        mean_kl: Mean of KL(reference ‖ candidate) over the positions, in nats.
        worst_kl: The largest of them.
    """

    positions: int
    perplexity: dict[Side, float]
    perplexity_change: float
    top1_agreement: float
    mean_kl: float
    worst_kl: float


class ComparisonResult(_Model):
    """Figures of some prompts.

    Attributes:
        prompts: How many.
        quality: Of both targets' predictions.
        rounds: Drafting rounds of each bundle that has a drafter.
        acceptance: How much of these drafts stood, each drafter with its own bundle's target.
    """

    prompts: int
    quality: QualityFigures
    rounds: dict[Side, int]
    acceptance: dict[Side, AcceptanceFigures]


class Comparison(_Model):
    """What a comparison found.

    Attributes:
        reference: The bundle whose distributions are taken as right.
        candidate: The bundle that is judged.
        settings: How it was run.
        datasets: Results by dataset.
        pooled: Results of all prompts together.
    """

    schema_version: Literal[1] = 1
    reference: BundleSummary
    candidate: BundleSummary
    settings: ComparisonSettings
    datasets: dict[str, ComparisonResult]
    pooled: ComparisonResult


class PositionScores(NamedTuple):
    """What some positions of a text say about both bundles.

    Attributes:
        reference_loss: Negative log-likelihood of the next token in nats ``[n]``.
        candidate_loss: The same ``[n]``.
        agrees: Whether both find the same token likeliest ``[n]``.
        divergence: KL(reference ‖ candidate) in nats ``[n]``.
    """

    reference_loss: Floats
    candidate_loss: Floats
    agrees: NDArray[np.bool_]
    divergence: Floats


def score_positions(reference: Floats, candidate: Floats, following: Sequence[int]) -> PositionScores:
    """Compares two predictions of the same tokens.

    Args:
        reference: The reference's log-probabilities ``[n, V]``.
        candidate: The candidate's ``[n, V]``.
        following: The tokens that came ``[n]``.
    """
    rows = np.arange(len(following))
    divergence = (np.exp(reference) * (reference - candidate)).sum(axis=1)
    return PositionScores(
        reference_loss=-reference[rows, following],
        candidate_loss=-candidate[rows, following],
        agrees=reference.argmax(axis=1) == candidate.argmax(axis=1),
        divergence=np.maximum(divergence, 0),  # rounding may leave it a little below
    )


def quality_figures(scores: PositionScores) -> QualityFigures:
    """Sums positions up; there must be at least one."""
    losses: dict[Side, np.float64] = {
        "reference": scores.reference_loss.mean(),
        "candidate": scores.candidate_loss.mean(),
    }
    with np.errstate(over="ignore"):
        return QualityFigures(
            positions=len(scores.agrees),
            perplexity={side: float(np.exp(loss)) for side, loss in losses.items()},
            perplexity_change=float(np.expm1(losses["candidate"] - losses["reference"])),
            top1_agreement=float(scores.agrees.mean()),
            mean_kl=float(scores.divergence.mean()),
            worst_kl=float(scores.divergence.max()),
        )
