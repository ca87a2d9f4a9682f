"""Fits a bundle's calibration to drafts that it makes for given prompts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.calibration import CALIBRATION, Calibration, confidence_files
from dspark.runtime.bundle.files import check_writable, write_whole
from dspark.runtime.decoding.rounds import Round, RoundTable
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.errors import RequestError
from dspark.runtime.evaluation.datasets import Dataset
from dspark.runtime.evaluation.temperature_scaling import fit_temperatures, survival_errors
from dspark.runtime.inference import DSparkInference
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions, check_batch_size
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.model.limits import ModelLimits
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["FEWEST_ROUNDS", "run_calibration"]

FEWEST_ROUNDS = 200
"""Below this the calibration error of fifteen bins is mostly noise."""
UNDRAFTED = 2
"""Tokens of a request that no draft gives: the first comes from the prompt, the last is decoded without one."""


def run_calibration(
    path: Path,
    datasets: Sequence[Dataset],
    temperatures: Sequence[float],
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    host: HostOptions,
    console: Console,
) -> Calibration:
    """Generates with whole drafts verified, fits the temperatures and writes ``calibration.json`` into the bundle.

    A calibration that the bundle has already is neither used nor needed to be valid; it is replaced.

    Args:
        path: The bundle.
        datasets: Prompts.
        temperatures: Sampling temperatures; every prompt is run at each of them.
        max_new_tokens: Tokens generated per prompt.
        batch_size: Requests that run at once.
        seed: Of the first request; each has the next one.
        host: What runs the graphs.
        console: Shows the progress.

    Raises:
        BundleError: The bundle is damaged.
        NumericalError: The model returned values that are not finite.
        RequestError: The bundle has no confidence head, an option or a prompt is refused, or the prompts give too few
            drafts.
    """
    check_batch_size(batch_size)
    given = {"max_new_tokens": max_new_tokens, "seed": seed}
    every = [SamplingParams.parse(SamplingParams(), {**given, "temperature": each}) for each in temperatures]
    bundle = Bundle.open(path, check_hashes=False)
    manifest = bundle.manifest
    if manifest.drafter is None or not manifest.has_confidence:
        raise RequestError(f"{path}: has no confidence head, so there is nothing to calibrate")
    try:
        check_writable(path, [CALIBRATION])
    except OSError as error:
        raise RequestError(f"{path}: cannot be written, so it cannot take a calibration: {error}") from error
    use = ServingOptions(SpeculationOptions("fixed"), batch_size)
    use.resolve(manifest, ModelLimits.of(manifest))
    with console.status(Text(f"Loading {path}")):
        # A former calibration is neither used nor needed to be valid.
        inference = DSparkInference(
            LoadedModel(bundle, open_sessions(bundle, host, list(manifest.precision)), host=host), use
        )
        possible = 0
        for dataset in datasets:
            for requests in dataset.batches(inference, every[0], batch_size, seed):
                limits = [request.sampler.params.max_new_tokens for request in requests]
                possible += len(every) * sum(max(limit - UNDRAFTED, 0) for limit in limits)
            for index, row in enumerate(dataset.rows):
                if "temperature" in row:
                    raise RequestError(
                        f"{dataset.name}, row {index}: has its own temperature; give --temperature instead"
                    )
    _check_rounds(possible, "at most ")
    rounds = _record(inference, datasets, every, batch_size, seed, console)
    table = RoundTable.of(rounds, manifest.drafter.draft_length, confidence=True)
    _check_rounds(len(table))
    with console.status("Fitting"):
        fitted = fit_temperatures(table)
    calibration = Calibration(
        temperatures=tuple(fitted.tolist()),
        rounds=len(table),
        sampling_temperatures=tuple(temperatures),
        survival_ece_before=tuple(survival_errors(table, np.ones_like(fitted))),
        survival_ece_after=tuple(survival_errors(table, fitted)),
        files=confidence_files(manifest),
    )
    write_whole(bundle.file(CALIBRATION), f"{calibration.model_dump_json(indent=2)}\n".encode())
    return calibration


def _check_rounds(count: int, about: str = "") -> None:
    if count < FEWEST_ROUNDS:
        raise RequestError(
            f"these prompts give {about}{count} drafts; calibration needs at least {FEWEST_ROUNDS}, better thousands: "
            f"give more prompts or a larger max_new_tokens"
        )


def _record(
    inference: DSparkInference,
    datasets: Sequence[Dataset],
    every: Sequence[SamplingParams],
    batch_size: int,
    seed: int,
    console: Console,
) -> list[Round]:
    """What became of all drafts."""
    rounds: list[Round] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for params in every:
            for dataset in datasets:
                name = f"{dataset.name}, temperature {params.temperature:g}"
                task = progress.add_task(name, total=len(dataset.rows))
                for requests in dataset.batches(inference, params, batch_size, seed):
                    inference.run(requests)
                    for request in requests:
                        if request.failure is not None:
                            raise request.failure
                        rounds += request.rounds
                    progress.advance(task, len(requests))
                seed += len(dataset.rows)
    return rounds
