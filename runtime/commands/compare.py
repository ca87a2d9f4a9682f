"""``dspark-run compare``: how far a bundle is from another of the same model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.runtime.commands.checks import check_options
from dspark.runtime.commands.options import (
    PROMPTS,
    AllowFallback,
    BundleArgument,
    FirstSeed,
    Inputs,
    Json,
    MaxNewTokens,
    MoreInputs,
    Providers,
    Samples,
    Temperature,
    Threads,
)
from dspark.runtime.commands.terminal import messages
from dspark.runtime.reports.tables import show_tables

__all__ = ["compare"]


def compare(
    bundle: BundleArgument,
    reference: Annotated[
        Path,
        typer.Option(help="The bundle that it is judged by, such as the one in fp32.", rich_help_panel=PROMPTS),
    ],
    input: Inputs,  # noqa: A002 - the option's name
    more: MoreInputs = None,
    temperature: Temperature = 0.0,
    samples: Samples = None,
    max_new_tokens: MaxNewTokens = 128,
    seed: FirstSeed = 0,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """Measures how far a bundle is from another of the same model: perplexity, agreement, KL and acceptance length.

    The text is every prompt and what the reference makes of it; both bundles predict each of its tokens. Each file is
    a dataset, with rows as generate takes them.
    """
    from dspark.runtime.bundle.bundle import Bundle
    from dspark.runtime.decoding.sampling_params import SamplingParams
    from dspark.runtime.evaluation.datasets import read_datasets
    from dspark.runtime.evaluation.quality import run_comparison
    from dspark.runtime.evaluation.quality_figures import ComparisonSettings
    from dspark.runtime.evaluation.tables import comparison_tables

    datasets = read_datasets([*input, *(more or [])], samples)
    sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
    params = SamplingParams.parse(SamplingParams(), sampling)
    rows = [row for dataset in datasets for row in dataset.rows]
    for each in (bundle, reference):
        if Bundle.open(each, check_hashes=False).manifest.shapes is None:  # the comparison refuses fixed ones itself
            check_options(each, params, rows)
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
