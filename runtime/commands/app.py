"""``dspark-run``: generate, chat, inspect, providers, bench, profile, evaluate, calibrate, compare."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dspark.providers import Selection
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.calibration import read_calibration
from dspark.runtime.commands.cost_report import draw_profile, show_profile
from dspark.runtime.commands.display import show_bundle, show_engines, show_placement, show_providers
from dspark.runtime.commands.evaluate import calibrate, compare, evaluate
from dspark.runtime.commands.options import (
    AllowFallback,
    BundleArgument,
    ConfidenceThreshold,
    Json,
    MaxDraftTokens,
    Profile,
    Providers,
    Scheduler,
    Threads,
    messages,
    refuse_given,
)
from dspark.runtime.commands.provider_report import engine_rows, placement, provider_rows
from dspark.runtime.conversation import Conversation
from dspark.runtime.costs.measure import full_grid, measure
from dspark.runtime.costs.store import check_cost_folder, cost_key, write_costs
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.request import Completion, Request
from dspark.runtime.errors import DSparkError, RequestError
from dspark.runtime.evaluation.report import check_report
from dspark.runtime.inference import DSparkInference, check_batch_size
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.measuring.decoding import BenchReport, default_prompts, run_benchmark
from dspark.runtime.measuring.load import CONCURRENCIES, LoadSettings, run_load_benchmark
from dspark.runtime.measuring.load_report import load_table, write_load_report
from dspark.runtime.measuring.operators import GraphProfile, profile_graphs
from dspark.runtime.reports.lines import notices
from dspark.runtime.reports.pictures import can_draw
from dspark.runtime.reports.tables import show_tables
from dspark.runtime.rows import completion_row, parse_row, read_rows, refused
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["main"]

app = typer.Typer(
    help="Runs bundles made by dspark-export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
MaxNewTokens = Annotated[int | None, typer.Option(help="Tokens to generate at most.", show_default="128")]
Temperature = Annotated[float | None, typer.Option(help="Below 1e-5 the likeliest token is taken.", show_default="0")]
TopK = Annotated[int | None, typer.Option(help="Sample from the K likeliest tokens; 0: from all.", show_default="0")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this mass.", show_default="1")]
MinP = Annotated[
    float | None, typer.Option(help="Drop tokens less likely than this times the likeliest.", show_default="0")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Divides logits of tokens seen before.", show_default="1")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Subtracted from logits of generated tokens.", show_default="0")
]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same, once an occurrence.", show_default="0")]
Stop = Annotated[list[str] | None, typer.Option(help="Ends the text; may be given several times.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]


@app.command()
def generate(
    bundle: BundleArgument,
    prompt: Annotated[str | None, typer.Option(help="One prompt.")] = None,
    input: Annotated[  # noqa: A002 - the option's name
        str | None, typer.Option(help="A JSONL file of prompts, messages or prompt_ids; - reads standard input.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as they are, without the chat template.")] = False,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    stop: Stop = None,
    seed: Seed = None,
    scheduler: Scheduler = None,
    max_draft_tokens: MaxDraftTokens = None,
    confidence_threshold: ConfidenceThreshold = None,
    profile: Profile = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Requests that run at once.", show_default="8, or the profile's")
    ] = None,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """Generates text for one prompt or for every row of a file.

    Rows are {"prompt": …}, {"messages": […]} or {"prompt_ids": […]}; "priority" is "interactive" or "batch", and
    other keys override sampling options. A row that is refused says so in its place; the exit code is 1 if no row
    succeeded.
    """
    params = _sampling_params(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
        seed=seed,
    )
    if (prompt is None) == (input is None):
        raise RequestError("give either --prompt or --input")
    rows = list(read_rows(_lines(input))) if input is not None else [{"prompt": prompt}]
    options = SpeculationOptions(scheduler, max_draft_tokens, confidence_threshold)
    inference = _load(bundle, options, batch_size, threads, profile, provider, allow_fallback=allow_fallback)
    entries = [_entry(inference, row, params, raw=raw) for row in rows]
    succeeded = not entries
    with _progress(len(entries), "Generating", shown=as_json) as advance:
        for index, text, completion in _outputs(inference, entries):
            if as_json and completion is not None:
                print(json.dumps(completion_row(index, completion), ensure_ascii=False), flush=True)
            elif not as_json:
                print(text, end="" if completion is None else "\n", flush=True)
            if completion is None:
                continue
            advance()
            succeeded = succeeded or completion.error is None
            if completion.error is not None and not as_json:
                _print_error(f"row {index}: {completion.error}" if input is not None else completion.error)
    if not succeeded:
        raise typer.Exit(1)


@app.command()
def chat(
    bundle: BundleArgument,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    scheduler: Scheduler = None,
    max_draft_tokens: MaxDraftTokens = None,
    confidence_threshold: ConfidenceThreshold = None,
    profile: Profile = None,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
) -> None:
    """Holds a conversation that keeps its cache from turn to turn.

    Ctrl-C breaks an answer off, /exit or Ctrl-D ends the conversation.
    """
    params = _sampling_params(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    options = SpeculationOptions(scheduler, max_draft_tokens, confidence_threshold)
    inference = _load(bundle, options, 1, threads, profile, provider, allow_fallback=allow_fallback)
    conversation = Conversation(inference, system)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        except (RuntimeError, UnicodeDecodeError) as error:  # no terminal, or not text
            raise RequestError(f"standard input cannot be read: {error}") from error
        if text == "/exit":
            return
        if text:
            _answer(conversation, text, params)


@app.command()
def inspect(
    bundle: BundleArgument,
    show_nodes: Annotated[
        bool, typer.Option("--placement", help="Show instead which node of each graph would run where.")
    ] = False,
    provider: Providers = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Shows what a bundle holds and what it was compiled for, or where its graphs' nodes run."""
    if not show_nodes:
        refuse_given({"--provider": provider, "--threads": threads}, "needs --placement")
    opened = Bundle.open(bundle, check_hashes=False)
    if show_nodes:
        with messages.status("Placing"):
            nodes = placement(opened, Selection.parse(provider or "cpu"), threads)
        if as_json:
            print(json.dumps({graph: [vars(node) for node in placed] for graph, placed in nodes.items()}, indent=2))
        else:
            show_placement(nodes, Console())
    elif as_json:
        print(json.dumps({**opened.manifest.model_dump(mode="json"), "engines": engine_rows(opened)}, indent=2))
    else:
        show_bundle(opened.manifest, read_calibration(opened), Console())
        show_engines(engine_rows(opened), Console())


@app.command()
def providers(as_json: Json = False) -> None:
    """Lists the providers, their devices, and why one cannot be used."""
    rows = provider_rows()
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        show_providers(rows, Console())


@app.command()
def bench(
    bundle: BundleArgument,
    input: Annotated[  # noqa: A002 - the option's name
        Path | None, typer.Option(help="A JSONL file of prompts.", show_default="a few that come with the package")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens generated a prompt.")] = 96,
    repeats: Annotated[
        int | None, typer.Option(help="Times every prompt is run, plain and speculative in turn.", show_default="1")
    ] = None,
    scheduler: Scheduler = None,
    max_draft_tokens: MaxDraftTokens = None,
    confidence_threshold: ConfidenceThreshold = None,
    profile: Profile = None,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    profile_graph: Annotated[
        bool, typer.Option("--profile-graph", help="Name each graph's most expensive operators instead.")
    ] = False,
    load: Annotated[bool, typer.Option("--load", help="Measure every scheduler with several users instead.")] = False,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="With --load: numbers of users, separated by commas.", show_default=",".join(map(str, CONCURRENCIES))
        ),
    ] = None,
    schedulers: Annotated[
        str | None,
        typer.Option(
            help="With --load: schedulers, separated by commas; fixed:3 verifies 3 draft tokens.",
            show_default="all that the bundle allows",
        ),
    ] = None,
    requests_per_user: Annotated[
        int | None, typer.Option(help="With --load: requests that each user sends in a turn.", show_default="2")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="With --load: a folder for load.json and pictures.")] = None,
    as_json: Json = False,
) -> None:
    """Measures plain and speculative decoding in one interleaved run, and where a round's time goes.

    With --load it measures every scheduler with 1, 2, 4 … users who send one request after another.
    """
    rows = list(read_rows(_lines(str(input)) if input else default_prompts().splitlines(keepends=True)))
    options = SpeculationOptions(scheduler, max_draft_tokens, confidence_threshold)
    selection = Selection.parse(provider or "cpu", allow_fallback=allow_fallback)
    if load:
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
    measured: BenchReport | GraphProfile
    if profile_graph:
        refuse_given({"--repeats": repeats}, "does not go with --profile-graph")
        measured = profile_graphs(bundle, rows, options, max_new_tokens, threads, messages, selection, profile)
    else:
        times = 1 if repeats is None else repeats
        measured = run_benchmark(bundle, rows, options, max_new_tokens, times, threads, messages, selection, profile)
    if as_json:
        print(json.dumps(measured.as_dict(), indent=2))
    else:
        measured.show(Console())


@app.command()
def profile(
    bundle: BundleArgument,
    max_requests: Annotated[int, typer.Option(help="The most requests of a step.")] = 8,
    repeats: Annotated[int, typer.Option(help="Times that every kind of step is measured.")] = 11,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """Measures what steps and drafts cost on this device, for the hardware schedulers.

    Writes a table, and with matplotlib a picture of it, into the bundle's folder "cost".
    """
    check_batch_size(max_requests, "max_requests")
    if repeats < 1:
        raise RequestError(f"repeats is {repeats}; it must be at least 1")
    selection = Selection.parse(provider or "cpu", allow_fallback=allow_fallback)
    opened = Bundle.open(bundle, check_hashes=False)
    manifest = opened.manifest
    if manifest.drafter is None:
        raise RequestError(f"{bundle}: has no drafter, so there is nothing to schedule")
    if manifest.shapes is not None:
        raise RequestError(f"{bundle}: has fixed shapes, so what a step costs does not depend on its tokens")
    check_cost_folder(opened)
    with messages.status(Text(f"Loading {bundle}")):
        sessions = open_sessions(opened, selection, list(manifest.precision), threads, check_hashes=None)
    grid = full_grid(max_requests, manifest.drafter.draft_length, repeats)
    with _progress(repeats + 1, "Measuring", shown=True) as advance:
        measured = measure(opened, sessions, grid, advance)
    table = measured.table(cost_key(opened, selection, threads))
    if as_json:
        print(table.model_dump_json(indent=2))
    else:
        show_profile(measured, Console())
    file = write_costs(opened, table, draw_profile(measured) if can_draw() else None)
    if not as_json:
        picture = "and a picture beside it" if can_draw() else "no picture: pip install 'dspark-onnx[report]'"
        notices(Console())(f"Written: {file}, {picture}")


app.command()(evaluate)
app.command()(calibrate)
app.command()(compare)


def main() -> None:
    """Runs the command line; an error of ours becomes one line and exit code 1."""
    try:
        app()
    except (DSparkError, UnicodeEncodeError) as error:
        _print_error(str(error))
        sys.exit(1)
    except OSError as error:
        _print_error(f"the output cannot be written: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _bench_load(
    bundle: Path,
    rows: Sequence[Mapping[str, Any] | RequestError],
    options: SpeculationOptions,
    settings: LoadSettings,
    folder: Path | None,
    *,
    as_json: bool,
) -> None:
    if folder is not None:
        check_report(folder)
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


def _sampling_params(**options: Any) -> SamplingParams:
    given = {name: value for name, value in options.items() if value is not None}
    return SamplingParams.parse(SamplingParams(), given)


def _lines(source: str) -> Iterator[bytes]:
    try:
        if source == "-":
            if sys.stdin is None:
                raise RequestError("--input -: there is no standard input")
            yield from sys.stdin.buffer
            return
        with Path(source).open("rb") as file:
            yield from file
    except OSError as error:
        raise RequestError(f"{source}: cannot be read: {error}") from error


def _load(
    bundle: Path,
    options: SpeculationOptions,
    batch_size: int | None,
    threads: int | None,
    profile: str | None,
    provider: Sequence[str] | None,
    *,
    allow_fallback: bool,
) -> DSparkInference:
    with messages.status(Text(f"Loading {bundle}")):
        return DSparkInference.load(
            bundle,
            options=options,
            batch_size=batch_size,
            threads=threads,
            profile=profile,
            notify=notices(messages),
            provider=provider or "cpu",
            allow_fallback=allow_fallback,
            shared=False,
        )


def _entry(
    inference: DSparkInference, row: Mapping[str, Any] | RequestError, params: SamplingParams, *, raw: bool
) -> Request | RequestError:
    """A row's request, or why it is refused."""
    if isinstance(row, RequestError):
        return row
    try:
        return parse_row(inference, row, params, raw=raw)
    except RequestError as error:
        return error


def _outputs(
    inference: DSparkInference, entries: Sequence[Request | RequestError]
) -> Iterator[tuple[int, str, Completion | None]]:
    """Runs all entries and yields index, new text and, at its end, completion of one after another."""
    for entry in entries:
        if isinstance(entry, Request):
            inference.engine.submit(entry)
    for index, entry in enumerate(entries):
        if isinstance(entry, RequestError):
            yield index, "", refused(entry)
            continue
        while entry.finish_reason is None:
            inference.engine.step()
            yield index, entry.take_text(), None
        yield index, entry.take_text(), entry.completion()


@contextmanager
def _progress(total: int, description: str, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on the terminal for long work whose output goes elsewhere."""
    with Progress(
        console=messages, transient=True, disable=not shown or total < 2 or not messages.is_terminal
    ) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def _answer(conversation: Conversation, text: str, params: SamplingParams) -> None:
    try:
        with closing(conversation.reply(text, params)) as chunks:
            for chunk in chunks:
                print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    except RequestError as error:
        _print_error(str(error))
    print()


def _print_error(message: str) -> None:
    messages.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
