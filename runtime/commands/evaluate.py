"""``dspark-run evaluate``: how good a drafter is."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.runtime.commands.checks import check_options, chosen_batch_size
from dspark.runtime.commands.options import (
    OUTPUT,
    AllowFallback,
    BatchSize,
    BundleArgument,
    ConfidenceThreshold,
    FirstSeed,
    Inputs,
    Json,
    MaxDraftTokens,
    MaxNewTokens,
    MoreInputs,
    Providers,
    Samples,
    Scheduler,
    Temperature,
    Threads,
)
from dspark.runtime.commands.terminal import messages
from dspark.runtime.reports.tables import show_tables

__all__ = ["evaluate"]


def evaluate(
    bundle: BundleArgument,
    input: Inputs,  # noqa: A002 - the option's name
    more: MoreInputs = None,
    temperature: Temperature = 0.0,
    samples: Samples = None,
    max_new_tokens: MaxNewTokens = 128,
    seed: FirstSeed = 0,
    scheduler: Scheduler = None,
    max_draft_tokens: MaxDraftTokens = None,
    confidence_threshold: ConfidenceThreshold = None,
    batch_size: BatchSize = 1,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    report: Annotated[
        Path | None,
        typer.Option(help="A folder for evaluation.json, pictures and a page that shows all.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measures acceptance, speed against plain decoding, and the confidence head on files of prompts.

    Each file is a dataset, with rows as generate takes them. Whole drafts are verified if nothing else is asked for.
    """
    from dspark.runtime.decoding.sampling_params import SamplingParams
    from dspark.runtime.evaluation.datasets import read_datasets
    from dspark.runtime.evaluation.evaluator import EvaluationSettings, run_evaluation
    from dspark.runtime.evaluation.report import REPORT_FILES, write_report
    from dspark.runtime.evaluation.tables import evaluation_tables
    from dspark.runtime.reports.folder import check_report
    from dspark.runtime.scheduling.options import SpeculationOptions

    if report is not None:
        check_report(report, REPORT_FILES)
    datasets = read_datasets([*input, *(more or [])], samples)
    sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
    params = SamplingParams.parse(SamplingParams(), sampling)
    options = SpeculationOptions(scheduler, max_draft_tokens, confidence_threshold)
    rows = [row for dataset in datasets for row in dataset.rows]
    manifest = check_options(bundle, params, rows, options)
    if scheduler is None and confidence_threshold is None:
        scheduler = "fixed"  # tokens that are not verified tell nothing of the drafter
        options = SpeculationOptions(scheduler, max_draft_tokens)
    settings = EvaluationSettings(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        samples=samples,
        batch_size=chosen_batch_size(manifest, batch_size, default=1),
        seed=seed,
        threads=threads,
        scheduler=scheduler,
        max_draft_tokens=max_draft_tokens,
        confidence_threshold=confidence_threshold,
        providers=tuple(provider or ("cpu",)),
        allow_fallback=allow_fallback,
    )
    evaluation = run_evaluation(bundle, datasets, options, settings, messages)
    if report is not None:
        with messages.status("Drawing"):
            write_report(evaluation, report)
    if as_json:
        print(evaluation.model_dump_json(indent=2))
    else:
        show_tables(evaluation_tables(evaluation), Console())
