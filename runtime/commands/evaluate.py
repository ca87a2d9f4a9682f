"""The commands ``evaluate``, ``calibrate`` and ``compare``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dspark.providers import Selection
from dspark.runtime.bundle.calibration import Calibration
from dspark.runtime.commands.options import (
    AllowFallback,
    BatchSize,
    BundleArgument,
    ConfidenceThreshold,
    Json,
    MaxDraftTokens,
    Providers,
    Scheduler,
    Threads,
    messages,
)
from dspark.runtime.evaluation.calibrator import run_calibration
from dspark.runtime.evaluation.datasets import read_datasets
from dspark.runtime.evaluation.evaluator import EvaluationSettings, run_evaluation
from dspark.runtime.evaluation.quality import ComparisonSettings, run_comparison
from dspark.runtime.evaluation.report import check_report, write_report
from dspark.runtime.evaluation.tables import comparison_tables, evaluation_tables
from dspark.runtime.reports.tables import show_tables
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["calibrate", "compare", "evaluate"]

Input = Annotated[list[Path], typer.Option("--input", help="A JSONL file of prompts; may be given several times.")]
More = Annotated[
    list[Path] | None, typer.Argument(metavar="[FILE]...", help="More files: --input may be followed by several.")
]
Samples = Annotated[int | None, typer.Option(help="Rows taken of each file, the first ones.", show_default="all")]
Temperature = Annotated[float, typer.Option(help="Below 1e-5 the likeliest token is taken.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Seed = Annotated[int, typer.Option(help="Seed of the first prompt; each further one has the next.")]


def evaluate(
    bundle: BundleArgument,
    input: Input,  # noqa: A002 - the option's name
    more: More = None,
    temperature: Temperature = 0.0,
    report: Annotated[
        Path | None, typer.Option(help="A folder for evaluation.json, pictures and a page that shows all.")
    ] = None,
    samples: Samples = None,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    scheduler: Scheduler = None,
    max_draft_tokens: MaxDraftTokens = None,
    confidence_threshold: ConfidenceThreshold = None,
    batch_size: BatchSize = 1,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """Measures acceptance, speed against plain decoding, and the confidence head on files of prompts.

    Each file is a dataset, with rows as generate takes them. Whole drafts are verified if nothing else is asked for.
    """
    if report is not None:
        check_report(report)
    if scheduler is None and confidence_threshold is None:
        scheduler = "fixed"  # what is not verified tells nothing of the drafter
    datasets = read_datasets([*input, *(more or [])], samples)
    settings = EvaluationSettings(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        samples=samples,
        batch_size=batch_size,
        seed=seed,
        threads=threads,
        scheduler=scheduler,
        max_draft_tokens=max_draft_tokens,
        confidence_threshold=confidence_threshold,
        providers=tuple(provider or ("cpu",)),
        allow_fallback=allow_fallback,
    )
    options = SpeculationOptions(scheduler, max_draft_tokens, confidence_threshold)
    evaluation = run_evaluation(bundle, datasets, options, settings, messages)
    if report is not None:
        with messages.status("Drawing"):
            write_report(evaluation, report)
    if as_json:
        print(evaluation.model_dump_json(indent=2))
    else:
        show_tables(evaluation_tables(evaluation), Console())


def calibrate(
    bundle: BundleArgument,
    input: Input,  # noqa: A002 - the option's name
    more: More = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Sampling temperature; may be given several times.", show_default="0 and 1"),
    ] = None,
    samples: Samples = None,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    batch_size: BatchSize = 8,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """Fits the confidence head's temperatures to drafts for held-out prompts and writes them into the bundle.

    Every prompt is run at every temperature. Generation uses the result from then on.
    """
    datasets = read_datasets([*input, *(more or [])], samples)
    selection = Selection.parse(provider or "cpu", allow_fallback=allow_fallback)
    calibration = run_calibration(
        bundle, datasets, temperature or (0.0, 1.0), max_new_tokens, batch_size, seed, threads, messages, selection
    )
    if as_json:
        print(calibration.model_dump_json(indent=2))
    else:
        _show(calibration, Console())


def compare(
    bundle: BundleArgument,
    reference: Annotated[Path, typer.Option(help="The bundle that it is judged by, such as the one in fp32.")],
    input: Input,  # noqa: A002 - the option's name
    more: More = None,
    temperature: Temperature = 0.0,
    samples: Samples = None,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """Measures how far a bundle is from another of the same model: perplexity, agreement, KL and acceptance length.

    The text is every prompt and what the reference makes of it; both bundles predict each of its tokens. Each file is
    a dataset, with rows as generate takes them.
    """
    datasets = read_datasets([*input, *(more or [])], samples)
    settings = ComparisonSettings(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        samples=samples,
        seed=seed,
        threads=threads,
        providers=tuple(provider or ("cpu",)),
        allow_fallback=allow_fallback,
    )
    comparison = run_comparison(bundle, reference, datasets, settings, messages)
    if as_json:
        print(comparison.model_dump_json(indent=2))
    else:
        show_tables(comparison_tables(comparison), Console())


def _show(calibration: Calibration, console: Console) -> None:
    table = Table(title=f"Calibration, fitted to {calibration.rounds:,} drafts", title_justify="left")
    for name in ("position", "temperature", "survival ECE before", "after"):
        table.add_column(name, justify="right")
    before, after = calibration.survival_ece_before, calibration.survival_ece_after
    for position, figures in enumerate(zip(calibration.temperatures, before, after, strict=True), start=1):
        temperature, *errors = figures
        last = position == len(before)
        table.add_row(str(position), f"{temperature:.3f}", *map(_percent, errors), end_section=last)
    table.add_row("mean", "", *map(_percent, calibration.mean_survival_ece))
    console.print(table)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"
