"""``dspark-run calibrate``: makes a confidence head's promises honest."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dspark.runtime.commands.checks import check_options, chosen_batch_size
from dspark.runtime.commands.options import (
    SAMPLING,
    SERVING,
    AllowFallback,
    BundleArgument,
    FirstSeed,
    Inputs,
    Json,
    MaxNewTokens,
    MoreInputs,
    Providers,
    Samples,
    Threads,
)
from dspark.runtime.commands.terminal import messages
from dspark.runtime.reports.tables import ABSENT, TextTable, show_tables

if TYPE_CHECKING:
    from dspark.runtime.bundle.calibration import Calibration

__all__ = ["calibrate"]


def calibrate(
    bundle: BundleArgument,
    input: Inputs,  # noqa: A002 - the option's name
    more: MoreInputs = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            help="Sampling temperature; may be given several times.",
            show_default="0 and 1",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    samples: Samples = None,
    max_new_tokens: MaxNewTokens = 128,
    seed: FirstSeed = 0,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Requests that run at once.",
            show_default="8, or what fixed shapes allow",
            rich_help_panel=SERVING,
        ),
    ] = None,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """Fits the confidence head's temperatures to drafts for held-out prompts and writes them into the bundle.

    Every prompt is run at every temperature. Generation uses the result from then on.
    """
    from dspark.runtime.decoding.sampling_params import SamplingParams
    from dspark.runtime.evaluation.calibrator import run_calibration
    from dspark.runtime.evaluation.datasets import read_datasets
    from dspark.runtime.loading.host import HostOptions

    datasets = read_datasets([*input, *(more or [])], samples)
    params = SamplingParams.parse(SamplingParams(), {"max_new_tokens": max_new_tokens, "seed": seed})
    rows = [row for dataset in datasets for row in dataset.rows]
    size = chosen_batch_size(check_options(bundle, params, rows), batch_size, default=8)
    host = HostOptions.parse(provider, allow_fallback=allow_fallback, threads=threads)
    calibration = run_calibration(
        bundle, datasets, temperature or (0.0, 1.0), max_new_tokens, size, seed, host, messages
    )
    if as_json:
        print(calibration.model_dump_json(indent=2))
    else:
        show_tables([_table(calibration)], Console())


def _table(calibration: "Calibration") -> TextTable:
    before, after = calibration.survival_ece_before, calibration.survival_ece_after
    rows = [
        [str(position), f"{temperature:.3f}", *map(_percent, errors)]
        for position, (temperature, *errors) in enumerate(
            zip(calibration.temperatures, before, after, strict=True), start=1
        )
    ]
    rows.append(["mean", "", *map(_percent, calibration.mean_survival_ece)])
    title = f"Calibration, fitted to {calibration.rounds:,} drafts"
    return TextTable(title, ["position", "temperature", "survival ECE before", "after"], rows, summary=True)


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share:.2%}"
