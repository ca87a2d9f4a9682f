"""Writes conversations of a target with itself: token ids and a mask of the responses, to train a drafter on.

A drafter imitates its target, so it learns best from what the target itself says. The target invents the user's turns,
too: after the opening of its own chat template it goes on with a user's words. A file of first words ("Write a function
that") widens what it invents, and prompts from JSONL files are answered as they are.

The file is saved every few hundred conversations; run again with the same output, it is continued. Several processes
with one thread each, every one with its own seed and output, write more than one process with several threads.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dspark.runtime import DSparkError, DSparkInference, RequestError, SamplingParams, SpeculationOptions
from dspark.runtime.engine.request import Request
from dspark.runtime.rows import read_rows

MARK = "@@@@"
"""Stands for the user's words where the chat template is cut open."""
SAVE_EVERY = 256
USER_TOKENS = 160
"""Longest turn that the target invents for the user; longer ones are thrown away."""
MOST_UNFINISHED = 200
USER_TEMPERATURE = 0.8
TOP_P = 0.95


@dataclass
class Conversations:
    """Finished conversations, in the arrays that ``train.py`` reads.

    Attributes:
        length: Tokens of a row; longer conversations are cut, shorter ones filled with zeros.
        dtype: Of the ids.
        ids: Rows of token ids.
        masks: Rows that are 1 where the token is the assistant's.
        temperatures: Of the responses.
    """

    length: int
    dtype: type[np.unsignedinteger[Any]]
    ids: list[NDArray[np.unsignedinteger[Any]]] = field(default_factory=list)
    masks: list[NDArray[np.uint8]] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)

    def add(self, prompt: list[int], response: list[int], temperature: float) -> None:
        """Takes a conversation."""
        tokens = (prompt + response)[: self.length]
        ids, mask = np.zeros(self.length, self.dtype), np.zeros(self.length, np.uint8)
        ids[: len(tokens)] = tokens
        mask[len(prompt) : len(tokens)] = 1
        self.ids.append(ids)
        self.masks.append(mask)
        self.temperatures.append(temperature)

    def load(self, path: Path) -> None:
        """Takes over what an earlier run has written."""
        with np.load(path, allow_pickle=False) as saved:
            found = saved["ids"].shape[1]
            if found != self.length:
                raise RequestError(f"{path} has conversations of {found} tokens, not {self.length}; see --length")
            self.ids, self.masks = list(saved["ids"]), list(saved["response_mask"])
            self.temperatures = saved["temperature"].tolist()

    def save(self, path: Path) -> None:
        """Writes all of them."""
        partial = path.with_name(f".{path.name}.partial.npz")
        np.savez_compressed(
            partial,
            ids=np.stack(self.ids),
            response_mask=np.stack(self.masks),
            temperature=np.array(self.temperatures, np.float32),
        )
        partial.replace(path)


class Writer:
    """Keeps the engine's batch full: a finished user's turn becomes the prompt of a response.

    Args:
        model: The target.
        conversations: Receives what is finished.
        prompts: User's turns to answer as they are, each once, before any is invented.
        openings: First words of user's turns; every other invented turn begins with one.
        temperatures: Of the responses, in turn.
        seed: Makes the run repeatable.
    """

    def __init__(
        self,
        model: DSparkInference,
        conversations: Conversations,
        prompts: Sequence[str],
        openings: Sequence[str],
        temperatures: list[float],
        seed: int,
    ) -> None:
        self._model = model
        self._conversations = conversations
        self._random = np.random.default_rng([seed, len(conversations.ids)])
        self._temperatures = list(temperatures)
        self._opening = self._find_opening()
        self._openings = list(openings)
        self._inventing: dict[Request, str] = {}
        self._answering: dict[Request, float] = {}
        answered = {
            tuple(ids[: mask.argmax()].tolist())
            for ids, mask in zip(conversations.ids, conversations.masks, strict=True)
        }
        self._ready = deque(text for text in prompts if tuple(model.encode(text)) not in answered)
        self._unfinished = 0

    def run(self, count: int, batch_size: int) -> Iterator[None]:
        """Yields once for every finished conversation until there are ``count``."""
        engine = self._model.engine
        while len(self._conversations.ids) < count:
            while len(self._inventing) + len(self._answering) < batch_size + 2:
                self._start()
            for request in engine.step():
                if request.finish_reason is not None and self._finish(request):
                    yield

    def _start(self) -> None:
        if self._ready:
            self._answer(self._ready.popleft())
        else:
            self._invent()

    def _invent(self) -> None:
        begun = ""
        if self._openings and self._random.random() < 0.5:
            begun = self._openings[self._random.integers(len(self._openings))]
        prompt = self._opening + self._model.encode(begun, raw=True) if begun else self._opening
        request = self._submit(prompt, USER_TOKENS, USER_TEMPERATURE)
        self._inventing[request] = begun

    def _answer(self, text: str) -> None:
        prompt = self._model.encode(text)
        room = self._conversations.length - len(prompt)
        if room < self._conversations.length // 4:
            return
        temperature = self._temperatures[self._random.integers(len(self._temperatures))]
        request = self._submit(prompt, room, temperature)
        self._answering[request] = temperature

    def _submit(self, prompt: list[int], room: int, temperature: float) -> Request:
        seed = int(self._random.integers(2**31))
        params = SamplingParams(max_new_tokens=room, temperature=temperature, top_p=TOP_P, seed=seed)
        request = self._model.request(prompt, params)
        self._model.engine.submit(request)
        return request

    def _finish(self, request: Request) -> bool:
        """Notes what a request wrote; whether that completes a conversation."""
        if request.failure is not None:
            raise request.failure
        completion = request.completion()
        if request in self._inventing:
            text = self._inventing.pop(request) + (completion.text or "")
            if completion.finish_reason == "stop" and text.strip():
                self._ready.append(text)
                self._unfinished = 0
            else:
                self._unfinished += 1
            if self._unfinished == MOST_UNFINISHED:
                raise RequestError("the target does not end the user's turns that it invents; give prompts in a file")
            return False
        temperature = self._answering.pop(request)
        self._conversations.add(request.prompt_ids, completion.token_ids, temperature)
        return True

    def _find_opening(self) -> list[int]:
        """What the chat template writes before the user's words."""
        whole, mark = self._model.encode(MARK), self._model.encode(MARK, raw=True)
        for start in range(len(whole)):
            if whole[start : start + len(mark)] == mark:
                return whole[:start]
        raise RequestError("the chat template does not repeat the user's words; give prompts in a file")


def main(
    bundle: Annotated[Path, typer.Argument(help="The target's bundle.")],
    output: Annotated[Path, typer.Option(help="The .npz file to write or continue.")],
    conversations: Annotated[int, typer.Option(help="Conversations the file shall have.")] = 5000,
    prompts: Annotated[list[Path] | None, typer.Option(help="JSONL files of {prompt: …}.")] = None,
    openings: Annotated[Path | None, typer.Option(help="Text file: first words of a user's turn, one a line.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Of the responses, in turn.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a conversation.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Conversations written at once.")] = 64,
    threads: Annotated[int | None, typer.Option(help="Host threads; by default one a core.")] = None,
    seed: Annotated[int, typer.Option(help="Makes the run repeatable.")] = 0,
) -> None:
    """Writes conversations of a target with itself."""
    if conversations < 1:
        raise RequestError(f"conversations is {conversations}; it must be at least 1")
    begun = [] if openings is None else [line for line in openings.read_text("utf-8").splitlines() if line]
    texts = [text for path in prompts or [] for text in read_prompts(path)]
    options = SpeculationOptions("off")
    model = DSparkInference.load(bundle, options=options, batch_size=batch_size, threads=threads)
    small = model.bundle.manifest.target.vocabulary_size <= 2**16
    done = Conversations(length, np.uint16 if small else np.uint32)
    if output.exists():
        done.load(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    writer = Writer(model, done, texts, begun, temperature or [0.0, 0.3, 0.7, 1.0], seed)
    rate = TextColumn("{task.fields[rate]}")
    try:
        with Progress(TextColumn("Conversations"), MofNCompleteColumn(), TimeElapsedColumn(), rate) as progress:
            task = progress.add_task("", total=conversations, completed=len(done.ids), rate="")
            start, tokens = perf_counter(), 0
            for _ in writer.run(conversations, batch_size):
                tokens += int(done.masks[-1].sum())
                progress.update(task, advance=1, rate=f"{tokens / (perf_counter() - start):.0f} response tokens/s")
                if len(done.ids) % SAVE_EVERY == 0:
                    done.save(output)
    finally:
        if done.ids:
            done.save(output)


def read_prompts(path: Path) -> list[str]:
    """Texts of a JSONL file with rows {"prompt": …}."""
    texts = []
    with path.open("rb") as lines:
        for number, row in enumerate(read_rows(lines), start=1):
            if isinstance(row, RequestError):
                raise row
            if not isinstance(row.get("prompt"), str):
                raise RequestError(f"{path}: row {number} has no text as its prompt: {json.dumps(row)[:60]}")
            texts.append(row["prompt"])
    return texts


if __name__ == "__main__":
    try:
        typer.run(main)
    except (DSparkError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
