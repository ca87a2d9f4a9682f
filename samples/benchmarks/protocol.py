"""What the race and its workers say to each other, in JSON lines.

A worker says ``Ready`` once its model is loaded. To each ``Request`` on its standard input it then answers with an
``Answer``, or with a ``Failure``. Workers run in their peer's environment, so this needs the standard library only.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

__all__ = ["Answer", "Failure", "Generate", "Message", "Output", "Ready", "Request", "parser", "read", "serve", "write"]


@dataclass(frozen=True)
class Request:
    """One prompt to continue greedily.

    Attributes:
        prompt_ids: The prompt.
        max_new_tokens: Tokens to generate at most.
        stop_token_ids: Tokens that end the output, of which they are part.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    stop_token_ids: list[int]


@dataclass(frozen=True)
class Ready:
    """The model is loaded.

    Attributes:
        versions: Package → version of what runs it.
    """

    versions: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        token_ids: The output.
        first_tokens: How many of them came at once when the prompt was computed; one, without speculation.
        prefill_seconds: From the request to these first tokens.
        decode_seconds: From there to the last token.
    """

    token_ids: list[int]
    first_tokens: int
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Failure:
    """What went wrong."""

    error: str


Message: TypeAlias = Request | Ready | Answer | Failure
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Request, Ready, Answer, Failure)}


def write(message: Message) -> str:
    """The line of a message."""
    return json.dumps({type(message).__name__: asdict(message)}) + "\n"


def read(line: str) -> Message:
    """The message of a line.

    Raises:
        ValueError: The line is none that ``write`` makes.
    """
    try:
        ((kind, fields),) = json.loads(line).items()
        return _KINDS[kind](**fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a message: {line[:80]!r}") from error


@dataclass
class Output:
    """Takes the tokens of one generation as they come, and the time; it begins when this is made."""

    token_ids: list[int] = field(default_factory=list)
    _first_tokens: int = 0
    _start: float = field(default_factory=perf_counter)
    _first: float = 0.0
    _last: float = 0.0

    def write(self, tokens: Iterable[int]) -> None:
        """Takes tokens that have just been decided, possibly none."""
        before = len(self.token_ids)
        self.token_ids.extend(int(token) for token in tokens)
        if len(self.token_ids) == before:
            return
        self._last = perf_counter()
        if not before:
            self._first, self._first_tokens = self._last, len(self.token_ids)

    def answer(self) -> Answer:
        """The finished generation.

        Raises:
            ValueError: There was no token.
        """
        if not self.token_ids:
            raise ValueError("no token was generated")
        return Answer(self.token_ids, self._first_tokens, self._first - self._start, self._last - self._first)


Generate: TypeAlias = Callable[[Request], Answer]
"""Continues a prompt greedily."""


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every worker has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("model", type=Path, help="what the peer loads")
    options.add_argument("--threads", type=int, required=True, help="host threads")
    options.add_argument("--context-length", type=int, required=True, help="tokens of the longest prompt and output")
    return options


def serve(load: Callable[[], Generate], packages: Sequence[str]) -> None:
    """Loads a model and answers requests until the standard input ends.

    Args:
        load: Loads the model.
        packages: Distributions whose versions are told.
    """
    # Libraries print to the standard output, also from C: they get the standard error, the messages a copy.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8") as messages:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        sys.stdout = sys.stderr
        try:
            generate = load()
        except Exception as error:
            messages.write(write(_failure(error)))
            raise
        messages.write(write(Ready({name: version(name) for name in packages})))
        for line in sys.stdin:
            messages.write(write(_answer(generate, line)))


def _answer(generate: Generate, line: str) -> Answer | Failure:
    try:
        request = read(line)
        if not isinstance(request, Request):
            raise ValueError(f"a worker takes requests, not {request}")
        return generate(request)
    except Exception as error:  # whatever a peer raises belongs in the race's table
        return _failure(error)


def _failure(error: Exception) -> Failure:
    return Failure(f"{type(error).__name__}: {error}")
