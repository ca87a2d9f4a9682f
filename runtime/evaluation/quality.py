"""Measures how far one bundle is from another of the same model, such as int8 from fp32."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.manifest import DrafterInfo, Manifest
from dspark.runtime.decoding.finite import require_finite
from dspark.runtime.decoding.rounds import Round, RoundTable
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.request import Request
from dspark.runtime.errors import NumericalError, RequestError
from dspark.runtime.evaluation.datasets import Dataset
from dspark.runtime.evaluation.figures import acceptance_figures
from dspark.runtime.evaluation.quality_figures import (
    BundleSummary,
    Comparison,
    ComparisonResult,
    ComparisonSettings,
    Floats,
    PositionScores,
    Side,
    quality_figures,
    score_positions,
)
from dspark.runtime.inference import DSparkInference
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.graphs import ModelGraphs
from dspark.runtime.model.target import TokenRun
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["run_comparison"]

CHUNK = 32
"""Positions computed at once: bounds the memory of their float64 distributions."""


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
        host = HostOptions.parse(settings.providers, allow_fallback=settings.allow_fallback, threads=settings.threads)
        self.drafts = bundle.manifest.drafter is not None
        options = SpeculationOptions("fixed" if self.drafts else "off")
        use = ServingOptions(options, batch_size=1, max_sequence_length=context_length)
        loaded = LoadedModel.open(bundle, host, [use])
        self.inference = DSparkInference(loaded, use)
        self._name = str(bundle.path)
        graphs = ModelGraphs.of(bundle, {"target": loaded.sessions["target"]}, 1, PhaseClock())
        self._cache, self._target = graphs.cache, graphs.target

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
