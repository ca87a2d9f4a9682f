"""Measures a drafter on datasets: acceptance, speed against plain decoding, and the confidence head."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.calibration import Calibration
from dspark.runtime.bundle.manifest import DrafterInfo, HeadInfo
from dspark.runtime.decoding.rounds import Round, RoundTable
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.request import Request
from dspark.runtime.errors import RequestError
from dspark.runtime.evaluation.datasets import Dataset
from dspark.runtime.evaluation.figures import (
    THRESHOLDS,
    Figures,
    ReliabilityCurves,
    Scaling,
    SpeedFigures,
    acceptance_figures,
    confidence_figures,
    macro_average,
    reliability_curves,
    sweep_figures,
)
from dspark.runtime.inference import DSparkInference
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions, check_batch_size
from dspark.runtime.reports.lines import notices
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["Counts", "DatasetResult", "Evaluation", "EvaluationSettings", "run_evaluation"]

FEWEST_TOKENS = 3
"""The first token comes from the prompt, the last one is decoded without a draft."""
Way = Literal["plain", "speculative"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EvaluationSettings(_Model):
    """How an evaluation was run; see ``dspark-run evaluate``."""

    temperature: float
    max_new_tokens: int
    samples: int | None
    batch_size: int
    seed: int
    threads: int | None
    scheduler: str | None
    max_draft_tokens: int | None
    confidence_threshold: float | None
    providers: tuple[str, ...] = ("cpu",)
    allow_fallback: bool = False


class Counts(_Model):
    """What figures rest on.

    Attributes:
        prompts: Requests.
        greedy_prompts: Those of them that were decoded greedily.
        rounds: Drafting rounds.
        verified: Draft tokens verified.
        accepted: Draft tokens accepted.
        reached: Drafts whose token at each position was accepted or rejected, all before it having been accepted.
        reached_and_accepted: Those whose token was accepted.
        observed: Drafts of which it is known whether they survived up to and with each position.
        tokens: Decoded tokens by way, without each request's first, which the prompt's computation gives.
        seconds: Time of decoding them by way, without that computation.
        prefill_seconds: Time of the prompts' computation by way.
    """

    prompts: int
    greedy_prompts: int
    rounds: int
    verified: int
    accepted: int
    reached: list[int]
    reached_and_accepted: list[int]
    observed: list[int]
    tokens: dict[Way, int]
    seconds: dict[Way, float]
    prefill_seconds: dict[Way, float]


class DatasetResult(_Model):
    """Counts and figures of one dataset."""

    counts: Counts
    figures: Figures


class Evaluation(_Model):
    """What an evaluation found, as written to ``evaluation.json``.

    Attributes:
        bundle: Name of the bundle's folder.
        target: Name of the target.
        drafter: Description of the drafter.
        head: Description of its heads.
        precision: Precisions of each graph.
        settings: How it was run.
        calibration: The bundle's calibration.
        thresholds: Confidence thresholds of the sweeps.
        datasets: Results by dataset.
        macro_average: Figures averaged over datasets.
        pooled: Results of all requests together.
        reliability: Reliability curves of all rounds together; empty without a confidence head.
    """

    schema_version: Literal[1] = 1
    bundle: str
    target: str
    drafter: DrafterInfo
    head: HeadInfo | None
    precision: dict[str, str]
    settings: EvaluationSettings
    calibration: Calibration | None
    thresholds: tuple[float, ...] = THRESHOLDS
    datasets: dict[str, DatasetResult]
    macro_average: Figures
    pooled: DatasetResult
    reliability: dict[Scaling, ReliabilityCurves]

    @property
    def scaling(self) -> Scaling:
        """Which confidences generation uses."""
        return "raw" if self.calibration is None else "calibrated"


@dataclass
class _Measured:
    """The measurements of a run of requests; several can be added up."""

    prompts: int = 0
    greedy: int = 0
    identical: int = 0
    rounds: list[Round] = field(default_factory=list)
    tokens: defaultdict[Way, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[Way, float] = field(default_factory=lambda: defaultdict(float))
    prefill_seconds: defaultdict[Way, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: "_Measured") -> None:
        self.prompts += other.prompts
        self.greedy += other.greedy
        self.identical += other.identical
        self.rounds += other.rounds
        for way in other.tokens:
            self.tokens[way] += other.tokens[way]
            self.seconds[way] += other.seconds[way]
            self.prefill_seconds[way] += other.prefill_seconds[way]

    @property
    def speed(self) -> SpeedFigures:
        rates: dict[Way, float | None] = {
            way: self.tokens[way] / self.seconds[way] if self.tokens[way] else None for way in self.tokens
        }
        plain, speculative = rates.get("plain"), rates.get("speculative")
        return SpeedFigures(
            plain=plain,
            speculative=speculative,
            speedup=speculative / plain if plain and speculative else None,
            identical_outputs=self.identical / self.greedy if self.greedy else None,
        )


def run_evaluation(
    path: Path, datasets: Sequence[Dataset], options: SpeculationOptions, settings: EvaluationSettings, console: Console
) -> Evaluation:
    """Runs every prompt plainly and with speculation, batch by batch in turn.

    Args:
        path: The bundle.
        datasets: The prompts.
        options: How to speculate.
        settings: How to run them.
        console: Shows the progress.

    Raises:
        BundleError: The bundle or its calibration is damaged.
        NumericalError: The model returned values that are not finite.
        RequestError: The bundle has no drafter, or an option or a prompt is refused.
    """
    check_batch_size(settings.batch_size)
    params = SamplingParams.parse(
        SamplingParams(), settings.model_dump(include={"temperature", "max_new_tokens", "seed"})
    )
    if settings.max_new_tokens < FEWEST_TOKENS:
        raise RequestError(f"max_new_tokens is {settings.max_new_tokens}; to draft at all takes {FEWEST_TOKENS}")
    bundle = Bundle.open(path, check_hashes=False)
    manifest = bundle.manifest
    if manifest.drafter is None:
        raise RequestError(f"{path}: has no drafter, so there is nothing to evaluate")
    plan = options.resolve(manifest)
    if plan is None:
        raise RequestError("scheduler 'off' does not draft, so there is nothing to evaluate; use 'fixed'")
    host = HostOptions.parse(settings.providers, allow_fallback=settings.allow_fallback, threads=settings.threads)
    use = ServingOptions(options, settings.batch_size)
    with console.status(Text(f"Loading {path}")):
        loaded = LoadedModel.open(bundle, host, [use])
        costs = loaded.costs([loaded.plan(use)], notices(console))
        ways: dict[Way, DSparkInference] = {
            "plain": DSparkInference(loaded, replace(use, speculation=SpeculationOptions("off"))),
            "speculative": DSparkInference(loaded, use, costs),
        }
        for dataset in datasets:
            dataset.check(ways["plain"], params)
    scalings: dict[Scaling, NDArray[np.float64]] = {}
    if manifest.has_confidence:
        scalings["raw"] = np.ones(manifest.drafter.draft_length)
        if loaded.calibration is not None:
            scalings["calibrated"] = np.array(loaded.calibration.temperatures)
    whole_drafts = plan.scheduler == "fixed"
    measured = _measure(ways, datasets, params, settings, console)
    everything = _Measured()
    for each in measured.values():
        everything.add(each)

    def tabulated(part: _Measured) -> RoundTable:
        assert manifest.drafter is not None
        return RoundTable.of(part.rounds, manifest.drafter.draft_length, confidence=bool(scalings))

    results = {name: _result(part, tabulated(part), scalings, whole_drafts) for name, part in measured.items()}
    table = tabulated(everything)
    return Evaluation(
        bundle=path.resolve().name,
        target=manifest.target.name,
        drafter=manifest.drafter,
        head=manifest.head,
        precision={name: str(info) for name, info in manifest.precision.items()},
        settings=settings,
        calibration=loaded.calibration,
        datasets=results,
        macro_average=macro_average([result.figures for result in results.values()]),
        pooled=_result(everything, table, scalings, whole_drafts),
        reliability={name: reliability_curves(table, temperatures) for name, temperatures in scalings.items()},
    )


def _measure(
    ways: Mapping[Way, DSparkInference],
    datasets: Sequence[Dataset],
    params: SamplingParams,
    settings: EvaluationSettings,
    console: Console,
) -> dict[str, _Measured]:
    """Runs every batch both ways, each going first every other time."""
    measured, seed = {}, settings.seed
    few = params.model_copy(update={"max_new_tokens": FEWEST_TOKENS})
    for inference in ways.values():  # a graph's first call is slow
        inference.run(next(datasets[0].batches(inference, few, settings.batch_size, seed)))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for dataset in datasets:
            part = measured[dataset.name] = _Measured()
            batches = zip(
                *(dataset.batches(inference, params, settings.batch_size, seed) for inference in ways.values()),
                strict=True,
            )
            seed += len(dataset.rows)
            task = progress.add_task(dataset.name, total=len(dataset.rows))
            for index, batch in enumerate(batches):
                turns = list(zip(ways.items(), batch, strict=True))
                for (way, inference), requests in turns[:: -1 if index % 2 else 1]:
                    _time(way, inference, requests, part)
                plain, speculative = batch
                part.prompts += len(speculative)
                for one, other in zip(plain, speculative, strict=True):
                    part.rounds += other.rounds
                    part.greedy += other.sampler.greedy
                    part.identical += other.sampler.greedy and one.output_ids == other.output_ids
                progress.advance(task, len(speculative))
    return measured


def _time(way: Way, inference: DSparkInference, requests: Sequence[Request], part: _Measured) -> None:
    """Runs a batch and notes tokens and time."""
    prefill_before, start = inference.clock.seconds["prefill"], perf_counter()
    inference.run(requests)
    total, prefill = perf_counter() - start, inference.clock.seconds["prefill"] - prefill_before
    for request in requests:
        if request.failure is not None:
            raise request.failure
    part.tokens[way] += sum(len(request.output_ids) - 1 for request in requests)
    part.seconds[way] += total - prefill
    part.prefill_seconds[way] += prefill


def _result(
    part: _Measured, table: RoundTable, scalings: Mapping[Scaling, NDArray[np.float64]], whole_drafts: bool
) -> DatasetResult:
    swept = scalings if whole_drafts else {}
    return DatasetResult(
        counts=Counts(
            prompts=part.prompts,
            greedy_prompts=part.greedy,
            rounds=len(table),
            verified=int(table.verified.sum()),
            accepted=int(table.accepted.sum()),
            reached=table.reached.sum(axis=0).tolist(),
            reached_and_accepted=(table.reached & table.survived).sum(axis=0).tolist(),
            observed=table.observed.sum(axis=0).tolist(),
            tokens=dict(part.tokens),
            seconds=dict(part.seconds),
            prefill_seconds=dict(part.prefill_seconds),
        ),
        figures=Figures(
            acceptance=acceptance_figures(table),
            speed=part.speed,
            confidence={name: confidence_figures(table, temperatures) for name, temperatures in scalings.items()},
            sweep={name: sweep_figures(table, temperatures) for name, temperatures in swept.items()},
        ),
    )
