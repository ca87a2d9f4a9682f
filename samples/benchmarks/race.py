"""The race: all contestants are loaded, one at a time works, prompt by prompt."""

import os
import select
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TypeVar

from contestants import Contestant
from protocol import Answer, Failure, Message, Ready, Request, read, write

__all__ = ["Result", "Worker", "WorkerError", "orders", "run"]

HERE = Path(__file__).parent
PATIENCE_SECONDS = 600.0
"""How long a contestant may take to load or to answer."""
WARM_UP_TOKENS = 8

Expected = TypeVar("Expected", bound=Message)


class WorkerError(Exception):
    """A contestant failed; the message is its own."""


@dataclass
class Result:
    """How one contestant did.

    Attributes:
        contestant: Who it is.
        versions: Package → version of what it ran on.
        answers: One a prompt, in the order of the prompts.
        error: Why it is out of the race.
    """

    contestant: Contestant
    versions: dict[str, str] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    error: str | None = None


class Worker:
    """A contestant's process.

    Args:
        command: Starts it.
        variables: Its environment variables.
        errors: File for its standard error.

    Raises:
        WorkerError: It cannot be started, or failed to load.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], errors: Path) -> None:
        self._errors = errors
        try:
            with errors.open("wb") as file:
                self._process = subprocess.Popen(
                    command,
                    cwd=HERE,
                    env=dict(variables),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    encoding="utf-8",
                )
        except OSError as error:
            raise WorkerError(f"cannot start {command[0]}: {error.strerror}") from error
        try:
            self.versions = self._receive(Ready).versions
        except WorkerError:
            self.close()
            raise

    def ask(self, request: Request) -> Answer:
        """Has a prompt continued.

        Raises:
            WorkerError: It failed.
        """
        try:
            self._pipe(self._process.stdin).write(write(request))
            self._pipe(self._process.stdin).flush()
        except BrokenPipeError as error:
            raise WorkerError(self._last_words()) from error
        return self._receive(Answer)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def _receive(self, kind: type[Expected]) -> Expected:
        output = self._pipe(self._process.stdout)
        # A worker says nothing unasked, so no line can wait in the buffer unseen.
        if not select.select([output], [], [], PATIENCE_SECONDS)[0]:
            raise WorkerError(f"no answer in {PATIENCE_SECONDS:.0f} seconds")
        line = output.readline()
        if not line:
            raise WorkerError(self._last_words())
        try:
            message = read(line)
        except ValueError as error:
            raise WorkerError(str(error)) from error
        if isinstance(message, Failure):
            raise WorkerError(message.error)
        if not isinstance(message, kind):
            raise WorkerError(f"expected {kind.__name__}, got {message}")
        return message

    def _last_words(self) -> str:
        code = self._process.wait()
        lines = self._errors.read_text(encoding="utf-8", errors="replace").splitlines()
        said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"the process ended with code {code}: {said}"

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None  # all of them are pipes
        return stream


def orders(contestants: int, prompts: int) -> Iterator[list[int]]:
    """In which order the contestants get each prompt: the first of one prompt is the last of the next."""
    for prompt in range(prompts):
        yield [(prompt + place) % contestants for place in range(contestants)]


def run(
    contestants: Sequence[Contestant], requests: Sequence[Request], threads: int, progress: Callable[[str], object]
) -> list[Result]:
    """Runs the race.

    Who fails is out of the race; the others go on.

    Args:
        contestants: Who takes part.
        requests: The prompts.
        threads: Host threads of each.
        progress: Told what is going on.

    Returns:
        The results, in the order of the contestants.
    """
    length = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    # A text whose beginning no prompt has, so that a cache of prompts gains nothing.
    warm_up = Request(requests[0].prompt_ids[::-1], WARM_UP_TOKENS, requests[0].stop_token_ids)
    results = [Result(contestant) for contestant in contestants]
    workers: dict[int, Worker] = {}
    with TemporaryDirectory() as logs, ExitStack() as processes:
        for index, contestant in enumerate(contestants):
            progress(f"loading {contestant.name}")
            try:
                worker = Worker(contestant.command(threads, length), variables, Path(logs) / str(index))
                processes.callback(worker.close)
                worker.ask(warm_up)
                workers[index] = worker
                results[index].versions = worker.versions
            except WorkerError as error:
                results[index].error = str(error)
        for number, (request, order) in enumerate(zip(requests, orders(len(contestants), len(requests)), strict=True)):
            for index in order:
                if index not in workers:
                    continue
                progress(f"prompt {number + 1} of {len(requests)}: {contestants[index].name}")
                try:
                    results[index].answers.append(workers[index].ask(request))
                except WorkerError as error:
                    results[index].error = str(error)
                    workers.pop(index).close()
    return results
