"""Measures how far one bundle is from another of the same model, such as int8 from fp32."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dspark.providers import Selection
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.manifest import DrafterInfo, Manifest
from dspark.runtime.cache.key_value_cache import make_cache
from dspark.runtime.decoding.finite import require_finite
from dspark.runtime.decoding.rounds import Round, RoundTable
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.request import Request
from dspark.runtime.errors import NumericalError, RequestError
from dspark.runtime.evaluation.datasets import Dataset
from dspark.runtime.evaluation.figures import AcceptanceFigures, acceptance_figures
from dspark.runtime.inference import DSparkInference
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.target import Target, TokenRun
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = [
    "BundleSummary",
    "Comparison",
    "ComparisonResult",
    "ComparisonSettings",
    "PositionScores",
    "QualityFigures",
    "Side",
    "quality_figures",
    "run_comparison",
    "score_positions",
]

CHUNK = 32
"""Positions computed at once: bounds the memory of their float64 distributions."""

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


def run_comparison(
    candidate: Path, reference: Path, datasets: Sequence[Dataset], settings: ComparisonSettings, console: Console
) -> Comparison:
    """Continues every prompt with the reference and has both bundles predict prompt and continuation.

    A bundle with a drafter generates with whole drafts verified, which gives its acceptance.

    Args:
        candidate: The bundle that is judged.
        reference: The bundle that it is judged by.
        datasets: The prompts.
        settings: How to run them.
        console: Shows the progress.

    Raises:
        BundleError: A bundle is damaged.
        NumericalError: A model returned values that are not finite; names the bundle.
        RequestError: The bundles do not read and write the same tokens, or an option or a prompt is refused.
    """
    params = SamplingParams.parse(
        SamplingParams(), settings.model_dump(include={"temperature", "max_new_tokens", "seed"})
    )
    paths: dict[Side, Path] = {"reference": reference, "candidate": candidate}
    bundles = {side: Bundle.open(path, check_hashes=False) for side, path in paths.items()}
    for side, bundle in bundles.items():
        if bundle.manifest.shapes is not None:
            raise RequestError(
                f"{paths[side]}: is made for fixed shapes, and a text is compared in longer pieces; "
                "export without --static to compare"
            )
    _check_same_tokens(bundles["reference"], bundles["candidate"])
    limit = min(bundle.manifest.context_length for bundle in bundles.values())
    with console.status(Text(f"Loading {reference} and {candidate}")):
        readers = {side: _Reader(bundle, settings, limit) for side, bundle in bundles.items()}
        for dataset in datasets:
            dataset.check(readers["reference"].inference, params)
    measured = _measure(readers, datasets, params, settings.seed, console)
    everything = _Measured()
    for part in measured.values():
        everything.add(part)
    drafters = {side: bundle.manifest.drafter for side, bundle in bundles.items()}
    return Comparison(
        reference=_summary(bundles["reference"]),
        candidate=_summary(bundles["candidate"]),
        settings=settings,
        datasets={name: _result(part, drafters) for name, part in measured.items()},
        pooled=_result(everything, drafters),
    )


class _Reader:
    """A loaded bundle that generates, and that predicts given text.

    Args:
        bundle: The bundle.
        settings: What runs it.
        context_length: Longest text in tokens.
    """

    def __init__(self, bundle: Bundle, settings: ComparisonSettings, context_length: int) -> None:
        manifest = bundle.manifest
        selection = Selection.parse(settings.providers, allow_fallback=settings.allow_fallback)
        sessions = open_sessions(bundle, selection, list(manifest.precision), settings.threads, None)
        self.drafts = manifest.drafter is not None
        options = SpeculationOptions("fixed" if self.drafts else "off")
        self.inference = DSparkInference(bundle, sessions, options, 1, context_length)
        self._name = str(bundle.path)
        self._cache = make_cache(manifest, sessions, 1)
        self._target = Target(sessions["target"], manifest, self._cache, PhaseClock())

    def generate(self, request: Request) -> None:
        """Runs a request to its end.

        Raises:
            NumericalError: The model returned values that are not finite.
        """
        self.inference.run([request])
        if request.failure is not None:
            raise NumericalError(f"{self._name}: {request.failure}") from request.failure

    def predict(self, tokens: Sequence[int], prompt_length: int) -> Iterator[Floats]:
        """Yields log-probabilities ``[≤ CHUNK, V]`` of what follows each token, piece after piece.

        Args:
            tokens: The text.
            prompt_length: How much of it was the prompt, which dynamic RoPE scaling depends on.

        Raises:
            NumericalError: The model returned values that are not finite.
        """
        self._cache.truncate(0, 0)
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            verification = self._target.verify([TokenRun(chunk, prompt_length)])
            self._target.commit(0, verification, 0, len(chunk))
            yield _log_softmax(verification.scores.rows, self._name)


def _log_softmax(logits: NDArray[np.float32], name: str) -> Floats:
    for row in logits:
        require_finite(row, name)
    shifted = logits - logits.max(axis=1, keepdims=True).astype(np.float64)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


@dataclass
class _Measured:
    """What prompts have left; several can be added up."""

    prompts: int = 0
    scores: list[PositionScores] = field(default_factory=list)
    rounds: dict[Side, list[Round]] = field(default_factory=lambda: {"reference": [], "candidate": []})

    def add(self, other: "_Measured") -> None:
        self.prompts += other.prompts
        self.scores += other.scores
        for side, rounds in other.rounds.items():
            self.rounds[side] += rounds


def _measure(
    readers: dict[Side, _Reader], datasets: Sequence[Dataset], params: SamplingParams, seed: int, console: Console
) -> dict[str, _Measured]:
    measured = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for dataset in datasets:
            part = measured[dataset.name] = _Measured()
            task = progress.add_task(dataset.name, total=len(dataset.rows))
            for (request,) in dataset.batches(readers["reference"].inference, params, 1, seed):
                _measure_prompt(readers, request, part)
                progress.advance(task)
            seed += len(dataset.rows)
    return measured


def _measure_prompt(readers: dict[Side, _Reader], request: Request, part: _Measured) -> None:
    """Runs the reference's request, has both bundles predict its text, and the candidate draft for its prompt."""
    reference, candidate = readers["reference"], readers["candidate"]
    reference.generate(request)
    part.prompts += 1
    part.rounds["reference"] += request.rounds
    prompt = request.prompt_ids
    text = prompt + request.output_ids
    predictions = zip(*(reader.predict(text[:-1], len(prompt)) for reader in (reference, candidate)), strict=True)
    for index, (right, judged) in enumerate(predictions):
        start = 1 + index * CHUNK
        part.scores.append(score_positions(right, judged, text[start : start + len(right)]))
    if candidate.drafts:
        drafted = candidate.inference.request(prompt, request.sampler.params)
        candidate.generate(drafted)
        part.rounds["candidate"] += drafted.rounds


def _result(part: _Measured, drafters: dict[Side, DrafterInfo | None]) -> ComparisonResult:
    tables = {
        side: RoundTable.of(part.rounds[side], drafter.draft_length, confidence=False)
        for side, drafter in drafters.items()
        if drafter is not None
    }
    columns: list[NDArray[Any]] = [np.concatenate(column) for column in zip(*part.scores, strict=True)]
    return ComparisonResult(
        prompts=part.prompts,
        quality=quality_figures(PositionScores(*columns)),
        rounds={side: len(table) for side, table in tables.items()},
        acceptance={side: acceptance_figures(table) for side, table in tables.items()},
    )


def _summary(bundle: Bundle) -> BundleSummary:
    manifest = bundle.manifest
    return BundleSummary(
        bundle=bundle.path.resolve().name,
        target=manifest.target.name,
        drafter=manifest.drafter,
        precision={name: str(info) for name, info in manifest.precision.items()},
    )


def _check_same_tokens(reference: Bundle, candidate: Bundle) -> None:
    """Refuses bundles whose token ids do not mean the same.

    Raises:
        RequestError: Their vocabularies or tokenizers differ.
    """
    sizes = [bundle.manifest.target.vocabulary_size for bundle in (reference, candidate)]
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"{candidate.path}: has a vocabulary of {sizes[1]} tokens, the reference {reference.path} one of "
            f"{sizes[0]}; only bundles of the same model can be compared"
        )
    if _tokenizer_hash(reference.manifest) != _tokenizer_hash(candidate.manifest):
        raise RequestError(
            f"{candidate.path}: its tokenizer is not that of the reference {reference.path}; only bundles of the same "
            f"model can be compared"
        )


def _tokenizer_hash(manifest: Manifest) -> str | None:
    name = manifest.text.tokenizer
    return None if name is None else manifest.files[name].sha256
