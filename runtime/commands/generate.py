"""``dspark-run generate``: text for one prompt, or for every row of a file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.runtime.commands.checks import check_options
from dspark.runtime.commands.loading import load
from dspark.runtime.commands.options import (
    PROMPTS,
    SAMPLING,
    SERVING,
    AllowFallback,
    BundleArgument,
    ConfidenceThreshold,
    FrequencyPenalty,
    Json,
    MaxDraftTokens,
    MaxNewTokens,
    MinP,
    PresencePenalty,
    Profile,
    Providers,
    RepetitionPenalty,
    Scheduler,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
)
from dspark.runtime.commands.prompts import read_lines
from dspark.runtime.commands.terminal import print_error, progress
from dspark.runtime.errors import RequestError

if TYPE_CHECKING:
    from dspark.runtime.decoding.sampling_params import SamplingParams
    from dspark.runtime.engine.request import Completion, Request
    from dspark.runtime.inference import DSparkInference

__all__ = ["generate"]


def generate(
    bundle: BundleArgument,
    prompt: Annotated[str | None, typer.Option(help="One prompt.", rich_help_panel=PROMPTS)] = None,
    input: Annotated[  # noqa: A002 - the option's name
        str | None,
        typer.Option(
            help="A JSONL file of prompts, messages or prompt_ids; - reads standard input.", rich_help_panel=PROMPTS
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Take prompts as they are, without the chat template.", rich_help_panel=PROMPTS),
    ] = False,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Ends the text; may be given several times.", rich_help_panel=SAMPLING),
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id", help="Ends the text at this token; may be given several times.", rich_help_panel=SAMPLING
        ),
    ] = None,
    seed: Seed = None,
    scheduler: Scheduler = None,
    max_draft_tokens: MaxDraftTokens = None,
    confidence_threshold: ConfidenceThreshold = None,
    profile: Profile = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Requests that run at once.", show_default="8, or the profile's", rich_help_panel=SERVING),
    ] = None,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """Generates text for one prompt or for every row of a file.

    Rows are {"prompt": text}, {"messages": list} or {"prompt_ids": list};
    "priority" is "interactive" or "batch", and other keys override sampling
    options. A row that is refused says so in its place; the exit code is 1 if
    no row succeeded.
    """
    from dspark.runtime.decoding.sampling_params import SamplingParams
    from dspark.runtime.rows import completion_row, read_rows
    from dspark.runtime.scheduling.options import SpeculationOptions

    given: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "stop": stop or (),
        "stop_token_ids": stop_token_ids or (),
        "seed": seed,
    }
    params = SamplingParams.parse(SamplingParams(), given)
    if (prompt is None) == (input is None):
        raise RequestError("give either --prompt or --input")
    rows = list(read_rows(read_lines(input))) if input is not None else [{"prompt": prompt}]
    options = SpeculationOptions(scheduler, max_draft_tokens, confidence_threshold)
    manifest = check_options(bundle, params, rows, options, profile)
    if not as_json and manifest.text.tokenizer is None:
        raise RequestError(f"{bundle}: has no tokenizer, so there is no text to print; add --json to print token ids")
    if prompt is not None and manifest.text.tokenizer is None:
        raise RequestError(f"{bundle}: has no tokenizer, which --prompt needs; give token ids with --input")
    inference = load(
        bundle,
        options,
        batch_size=batch_size,
        threads=threads,
        profile=profile,
        provider=provider,
        allow_fallback=allow_fallback,
    )
    entries = [_entry(inference, row, params, raw=raw) for row in rows]
    succeeded = not entries
    with progress(len(entries), "Generating", shown=as_json) as advance:
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
                print_error(f"row {index}: {completion.error}" if input is not None else completion.error)
    if not succeeded:
        raise typer.Exit(1)


def _entry(
    inference: "DSparkInference", row: Mapping[str, Any] | RequestError, params: "SamplingParams", *, raw: bool
) -> "Request | RequestError":
    """A row's request, or why it is refused."""
    from dspark.runtime.rows import parse_row

    if isinstance(row, RequestError):
        return row
    try:
        return parse_row(inference, row, params, raw=raw)
    except RequestError as error:
        return error


def _outputs(
    inference: "DSparkInference", entries: "Sequence[Request | RequestError]"
) -> "Iterator[tuple[int, str, Completion | None]]":
    """Runs all entries and yields index, new text and, at its end, completion of one after another."""
    from dspark.runtime.rows import refused

    for entry in entries:
        if not isinstance(entry, RequestError):
            inference.engine.submit(entry)
    for index, entry in enumerate(entries):
        if isinstance(entry, RequestError):
            yield index, "", refused(entry)
            continue
        while entry.finish_reason is None:
            inference.engine.step()
            yield index, entry.take_text(), None
        yield index, entry.take_text(), entry.completion()
