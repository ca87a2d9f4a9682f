"""Rows of JSONL: requests in, completions out."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dspark.runtime.bundle.versioned_file import unique_keys
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.request import Completion, Request, Stats
from dspark.runtime.errors import RequestError
from dspark.runtime.inference import DSparkInference, Prompt

__all__ = ["completion_row", "parse_row", "read_rows", "refused"]

PROMPT_KEYS = ("prompt", "messages", "prompt_ids")


def read_rows(lines: Iterable[bytes]) -> Iterator[Mapping[str, Any] | RequestError]:
    """Parses JSONL in UTF-8; a line that is no JSON object gives an error in its place. Empty lines are skipped."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.removeprefix(BOM_UTF8).decode(), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            yield RequestError(f"line {number} is not JSON: {error}")
            continue
        yield row if isinstance(row, dict) else RequestError(f"line {number} is no JSON object: {line[:60]!r}")


def parse_row(inference: DSparkInference, row: Mapping[str, Any], params: SamplingParams, *, raw: bool) -> Request:
    """Makes a request of a row.

    Args:
        inference: Checks the prompt.
        row: One of ``prompt``, ``messages`` and ``prompt_ids``, and maybe a ``priority``; any other key overrides a
            sampling option.
        params: Options that the row does not override.
        raw: Whether ``prompt`` is taken as it is, without the chat template.

    Raises:
        RequestError: The row is malformed or refused.
    """
    given = [key for key in PROMPT_KEYS if key in row]
    if len(given) != 1:
        found = " and ".join(given) or f"only {', '.join(map(repr, row)) or 'nothing'}"
        raise RequestError(f"a row must have exactly one of {', '.join(PROMPT_KEYS)}; this one has {found}")
    options = {key: value for key, value in row.items() if key not in (given[0], "priority")}
    prompt, params = _checked(given[0], row[given[0]]), SamplingParams.parse(params, options)
    return inference.request(prompt, params, raw=raw, priority=row.get("priority", "interactive"))


def _checked(key: str, value: object) -> Prompt:
    if key == "prompt" and isinstance(value, str):
        return value
    if key == "messages" and isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return value
    if key == "prompt_ids" and isinstance(value, list) and all(type(item) is int for item in value):
        return value
    wanted = {"prompt": "text", "messages": "a list of messages", "prompt_ids": "a list of token ids"}[key]
    raise RequestError(f"{key} must be {wanted}, not {json.dumps(value)[:60]}")


def refused(error: RequestError) -> Completion:
    """The completion of a request that was refused."""
    return Completion(text="", token_ids=[], finish_reason="error", error=str(error), prompt_tokens=0, stats=Stats())


def completion_row(index: int, completion: Completion) -> dict[str, Any]:
    """A completion as a row of the output."""
    stats = completion.stats
    return {
        "index": index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "prompt_tokens": completion.prompt_tokens,
        "stats": {
            "rounds": stats.rounds,
            "draft_lengths": stats.draft_lengths,
            "accepted_lengths": stats.accepted_lengths,
            "acceptance_length": stats.acceptance_length,
            "seconds": stats.seconds,
            "tokens_per_second": stats.tokens_per_second,
            "time_to_first_token": stats.time_to_first_token,
        },
    }
