"""``dspark-run bench``: speed, a round's time, operators, and the engine under load."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dspark.runtime.commands.checks import check_options, refuse_given
from dspark.runtime.commands.completion import complete_schedulers
from dspark.runtime.commands.options import (
    MEASUREMENT,
    PROMPTS,
    SAMPLING,
    AllowFallback,
    BundleArgument,
    ConfidenceThreshold,
    Json,
    MaxDraftTokens,
    Profile,
    Providers,
    Scheduler,
    Threads,
)
from dspark.runtime.commands.prompts import read_lines
from dspark.runtime.commands.terminal import messages
from dspark.runtime.errors import RequestError
from dspark.runtime.reports.tables import show_tables

if TYPE_CHECKING:
    from dspark.runtime.measuring.decoding import BenchReport
    from dspark.runtime.measuring.load_figures import LoadSettings
    from dspark.runtime.measuring.operators import GraphProfile
    from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["bench"]

LOAD = "With --load"
REPORT_FILES = ("load.json", "throughput.png", "verification.png")


def bench(
    bundle: BundleArgument,
    input: Annotated[  # noqa: A002 - the option's name
        Path | None,
        typer.Option(
            help="A JSONL file of prompts.",
            show_default="a few that come with the package",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.", rich_help_panel=SAMPLING)] = 96,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Times every prompt is run, plain and speculative in turn.",
            show_default="1",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    scheduler: Scheduler = None,
    max_draft_tokens: MaxDraftTokens = None,
    confidence_threshold: ConfidenceThreshold = None,
    profile: Profile = None,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    profile_graph: Annotated[
        bool,
        typer.Option(
            "--profile-graph",
            help="Name each graph's most expensive operators instead.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    load: Annotated[
        bool,
        typer.Option("--load", help="Measure every scheduler with several users instead.", rich_help_panel=MEASUREMENT),
    ] = False,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Numbers of users, separated by commas.", show_default="1,2,4,8,16,32", rich_help_panel=LOAD),
    ] = None,
    schedulers: Annotated[
        str | None,
        typer.Option(
            help="Schedulers, separated by commas; fixed:3 verifies 3 draft tokens.",
            show_default="all that the bundle allows",
            autocompletion=complete_schedulers,
            rich_help_panel=LOAD,
        ),
    ] = None,
    requests_per_user: Annotated[
        int | None,
        typer.Option(help="Requests that each user sends in a turn.", show_default="2", rich_help_panel=LOAD),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="A folder for load.json and pictures.", rich_help_panel=LOAD)
    ] = None,
    as_json: Json = False,
) -> None:
    """Measures plain and speculative decoding in one interleaved run, and where a round's time goes.

    With --load it measures every scheduler with 1, 2, 4 and more users that send one request after another.
    """
    from dspark.runtime.measuring.decoding import default_prompts
    from dspark.runtime.rows import read_rows
    from dspark.runtime.scheduling.options import SpeculationOptions

    rows = list(read_rows(read_lines(str(input)) if input else default_prompts().splitlines(keepends=True)))
    options = SpeculationOptions(scheduler, max_draft_tokens, confidence_threshold)
    if load:
        from dspark.runtime.measuring.load_figures import LoadSettings

        if scheduler is not None:
            raise RequestError(f"--scheduler {scheduler} chooses one; with --load use --schedulers")
        refuse_given({"--profile-graph": profile_graph}, "does not go with --load")
        given: dict[str, Any] = {
            "schedulers": None if schedulers is None else tuple(map(str.strip, schedulers.split(","))),
            "concurrencies": None if concurrency is None else _numbers("--concurrency", concurrency),
            "requests_per_user": requests_per_user,
            "repeats": repeats,
        }
        settings = LoadSettings(
            max_new_tokens=max_new_tokens,
            threads=threads,
            profile=profile,
            providers=tuple(provider or ("cpu",)),
            allow_fallback=allow_fallback,
            **{name: value for name, value in given.items() if value is not None},
        )
        _bench_load(bundle, rows, options, settings, report, as_json=as_json)
        return
    only_load = {
        "--concurrency": concurrency,
        "--schedulers": schedulers,
        "--requests-per-user": requests_per_user,
        "--report": report,
    }
    refuse_given(only_load, "needs --load")
    measured = _bench(
        bundle,
        rows,
        options,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        profile=profile,
        threads=threads,
        provider=provider or ["cpu"],
        allow_fallback=allow_fallback,
        profile_graph=profile_graph,
    )
    if as_json:
        print(json.dumps(measured.as_dict(), indent=2))
    else:
        measured.show(Console())


def _bench(
    bundle: Path,
    rows: Sequence[Mapping[str, Any] | RequestError],
    options: "SpeculationOptions",
    *,
    max_new_tokens: int,
    repeats: int | None,
    profile: str | None,
    threads: int | None,
    provider: Sequence[str],
    allow_fallback: bool,
    profile_graph: bool,
) -> "BenchReport | GraphProfile":
    from dspark.runtime.decoding.sampling_params import SamplingParams
    from dspark.runtime.loading.host import HostOptions
    from dspark.runtime.measuring.decoding import run_benchmark
    from dspark.runtime.measuring.operators import profile_graphs

    host = HostOptions.parse(provider, allow_fallback=allow_fallback, threads=threads)
    if max_new_tokens > 0:  # otherwise the measurement refuses it in its own words
        params = SamplingParams.parse(SamplingParams(), {"max_new_tokens": max_new_tokens})
        check_options(bundle, params, rows, options, profile)
    if profile_graph:
        refuse_given({"--repeats": repeats}, "does not go with --profile-graph")
        return profile_graphs(bundle, rows, options, max_new_tokens, host, messages, profile)
    times = 1 if repeats is None else repeats
    return run_benchmark(bundle, rows, options, max_new_tokens, times, host, messages, profile)


def _bench_load(
    bundle: Path,
    rows: Sequence[Mapping[str, Any] | RequestError],
    options: "SpeculationOptions",
    settings: "LoadSettings",
    folder: Path | None,
    *,
    as_json: bool,
) -> None:
    from dspark.runtime.decoding.sampling_params import SamplingParams
    from dspark.runtime.measuring.load import run_load_benchmark
    from dspark.runtime.measuring.load_report import load_table, write_load_report
    from dspark.runtime.reports.folder import check_report

    if folder is not None:
        check_report(folder, REPORT_FILES)
    params = SamplingParams.parse(SamplingParams(), {"max_new_tokens": settings.max_new_tokens})
    check_options(bundle, params, rows, profile=settings.profile)
    measured = run_load_benchmark(bundle, rows, options, settings, messages)
    if folder is not None:
        with messages.status("Drawing"):
            write_load_report(measured, folder)
    if as_json:
        print(measured.model_dump_json(indent=2))
    else:
        show_tables([load_table(measured)], Console())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise RequestError(f"{option} {text}: must be whole numbers, separated by commas") from error
