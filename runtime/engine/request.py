"""One generation: what was asked, what has been produced, and how it went."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.decoding.rounds import Round
from dspark.runtime.errors import DSparkError
from dspark.runtime.text.stream import TextStream

__all__ = ["Completion", "FinishReason", "Priority", "Request", "Stats"]

FinishReason = Literal["stop", "length", "error", "cancelled"]
Priority = Literal["interactive", "batch"]


@dataclass
class Stats:
    """How a generation went.

    Attributes:
        rounds: Verification steps.
        draft_lengths: Draft tokens verified, a round.
        accepted_lengths: Draft tokens accepted and emitted, a round.
        seconds: From the request's start to its end, waiting included.
        time_to_first_token: Seconds from the request's start.
        tokens_per_second: Emitted tokens over ``seconds``.
    """

    rounds: int = 0
    draft_lengths: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    seconds: float = 0.0
    time_to_first_token: float | None = None
    tokens_per_second: float = 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round emitted on average, the target's own included; None before the first round."""
        return 1 + sum(self.accepted_lengths) / self.rounds if self.rounds else None


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text: The output; None if the bundle has no tokenizer. A stop string and what follows is cut off.
        token_ids: The output's ids, a stop token included.
        finish_reason: ``stop`` (a stop token or string), ``length``, ``error`` or ``cancelled``.
        error: What went wrong, with ``error``.
        prompt_tokens: Length of the prompt.
        stats: How it went.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None
    prompt_tokens: int
    stats: Stats


class Request:
    """A generation under way.

    Args:
        prompt_ids: The prompt's ids, checked.
        sampler: Decides its tokens.
        stop_token_ids: Tokens that end it.
        stream: Turns its tokens into text; None if the bundle has no tokenizer.
        prefix: Cached tokens with which the prompt begins, fewer than it has (one slot); they are not computed again.
        keep_cache: Whether its cache is kept when it ends, as the prefix of a later request.
        priority: ``interactive`` requests are taken in before those of priority ``batch``.

    Attributes:
        output_ids: Ids emitted so far.
        finish_reason: Set when it has ended.
        cache: Its cache, when it has ended without an error and was to be kept.
        failure: What ended it, when that was an error.
        rounds: What became of its drafts.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        stop_token_ids: frozenset[int],
        stream: TextStream | None,
        *,
        prefix: KeyValueCache | None = None,
        keep_cache: bool = False,
        priority: Priority = "interactive",
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.sampler = sampler
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stats = Stats()
        self.rounds: list[Round] = []
        self.prefix = prefix
        self.keep_cache = keep_cache
        self.priority = priority
        self.cache: KeyValueCache | None = None
        self._stop_token_ids = stop_token_ids
        self._stream = stream
        self.failure: DSparkError | None = None
        self._fresh_text: deque[str] = deque()
        self._started = perf_counter()

    @property
    def anchor(self) -> int:
        """Its last token, which the target has not computed yet."""
        return self.output_ids[-1]

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.sampler.params.max_new_tokens - len(self.output_ids)

    @property
    def most_tokens(self) -> int:
        """Tokens of prompt and output together, if it emits as many as it may."""
        return len(self.prompt_ids) + self.sampler.params.max_new_tokens

    def emit(self, tokens: Sequence[int]) -> list[int]:
        """Takes decided tokens up to where the generation ends.

        Returns:
            The tokens taken; fewer than given if the limit or a stop string came first.
        """
        if self.stats.time_to_first_token is None:
            self.stats.time_to_first_token = perf_counter() - self._started
        taken = list(tokens[: self.remaining])
        ends = taken[-1] in self._stop_token_ids
        if self._stream is not None:
            # A stop token is no text, even where the tokenizer does not know it as special.
            self._fresh_text.append(self._stream.push(taken[:-1] if ends else taken))
            if self._stream.stopped:
                ends, taken = True, taken[: self._stream.kept]
        self.output_ids.extend(taken)
        if ends:
            self._finish("stop")
        elif self.remaining == 0:
            self._finish("length")
        return taken

    def record_round(self, drafted: int, accepted: int) -> None:
        """Notes how a verification step went.

        Args:
            drafted: Draft tokens verified.
            accepted: Draft tokens accepted and emitted.
        """
        self.stats.rounds += 1
        self.stats.draft_lengths.append(drafted)
        self.stats.accepted_lengths.append(accepted)

    def fail(self, error: DSparkError) -> None:
        """Ends the generation with an error; what was emitted stays."""
        self.failure = error
        self._finish("error")

    def cancel(self) -> None:
        """Ends the generation because nobody wants it any more; what was emitted stays."""
        self._finish("cancelled")

    def take_text(self) -> str:
        """The text decided since the last call; a step in another thread may go on adding to it."""
        return "".join(self._fresh_text.popleft() for _ in range(len(self._fresh_text)))

    def completion(self) -> Completion:
        """The finished generation."""
        assert self.finish_reason is not None, "asked for the completion of a running request"
        return Completion(
            text=None if self._stream is None else self._stream.text,
            token_ids=self.output_ids,
            finish_reason=self.finish_reason,
            error=None if self.failure is None else str(self.failure),
            prompt_tokens=len(self.prompt_ids),
            stats=self.stats,
        )

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._stream is not None:
            self._fresh_text.append(self._stream.finish())
        self.stats.seconds = perf_counter() - self._started
        self.stats.tokens_per_second = len(self.output_ids) / self.stats.seconds
