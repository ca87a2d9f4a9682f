"""The continuous-batching engine: draft, schedule, verify, commit.

A request moves from *waiting* through *prefill*, in chunks, to *running*; requests join and leave between rounds.
Running requests fill the cache's slots 0…R − 1, the one being prefilled has slot R.

Requests may come, be cancelled and be moved on from any thread; there is one step at a time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.bundle.calibration import confidences
from dspark.runtime.cache.key_value_cache import TARGET, KeyValueCache
from dspark.runtime.decoding.rounds import Round
from dspark.runtime.engine.queue import RequestQueue
from dspark.runtime.engine.request import Request
from dspark.runtime.engine.settings import EngineSettings
from dspark.runtime.engine.turns import Turns
from dspark.runtime.errors import DSparkError, NumericalError
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.drafter import Drafter, DraftInput, Proposal
from dspark.runtime.model.target import Target, TokenRun, Verification
from dspark.runtime.scheduling.scheduler import Batch, Scheduler

__all__ = ["Engine", "Speculation"]

PREFILL_CHUNK = 128
"""Prompt tokens a step computes, if nothing else is set: bounds attention's memory and the wait of running requests."""
NO_TOKENS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Speculation:
    """How the engine drafts.

    Attributes:
        drafter: Proposes tokens.
        scheduler: Chooses how many are verified.
        max_draft_tokens: The most that are verified of one draft.
        draft_length: Tokens a draft proposes (γ).
        confidence_temperatures: What each position's confidence logit is divided by, float32 ``[γ]``.
    """

    drafter: Drafter
    scheduler: Scheduler
    max_draft_tokens: int
    draft_length: int
    confidence_temperatures: NDArray[np.float32]


class Engine:
    """Runs requests to their end, several at a time.

    Args:
        target: The target's graph.
        cache: The cache that it reads.
        speculation: How to draft; None decodes plainly.
        batch_size: Requests that run at once; the cache has as many slots.
        clock: Tells where the time goes.
        settings: How requests are taken in.
    """

    def __init__(
        self,
        target: Target,
        cache: KeyValueCache,
        speculation: Speculation | None,
        batch_size: int,
        clock: PhaseClock,
        settings: EngineSettings,
    ) -> None:
        self._target = target
        self._cache = cache
        self._speculation = speculation
        self._batch_size = batch_size
        self._clock = clock
        self._settings = settings
        self._queue = RequestQueue(min(settings.min_batch_size, batch_size), settings.max_queue_delay)
        self._cancelled: deque[Request] = deque()
        self._turns = Turns()
        self._prefilling: Request | None = None
        self._running: list[Request] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._queue or self._prefilling or self._running)

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self._queue.push(request)

    def step(self) -> list[Request]:
        """Computes some of the prompts that wait, and one round of the running requests.

        While nothing runs, it first waits for a batch as the settings say. Once something runs, whoever comes joins it:
        a step costs little more for one more request, so waiting could only lose. While another thread's step is under
        way, it only waits for that to end.

        Returns:
            The requests that emitted tokens or ended.
        """
        if self._prefilling is None and not self._running:
            self._queue.wait()
        if not self._turns.take_or_wait():
            return []
        try:
            self._drop_cancelled()
            touched = self._admit()
            if self._running:
                touched += [request for request in self._round() if request not in touched]
            return touched
        finally:
            self._turns.end()
            self._settle()

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is, if it has not ended; its slot is free at once, or after the step under way."""
        self._cancelled.append(request)
        self._settle()

    def _settle(self) -> None:
        """Carries cancellations out, unless a step is under way, which does so when it ends."""
        while self._cancelled and self._turns.take():
            try:
                self._drop_cancelled()
            finally:
                self._turns.end()

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if request is self._prefilling:
                self._prefilling = None
            elif request in self._running:
                self._leave(request)
            elif not self._queue.remove(request):
                continue  # it has ended already
            request.cancel()

    def _admit(self) -> list[Request]:
        """Computes prompts up to the step's limit; returns the requests whose first token is decided."""
        started, budget = [], self._settings.prefill_tokens or PREFILL_CHUNK
        while budget > 0:
            if self._prefilling is None and len(self._running) < self._batch_size:
                self._prefilling = self._queue.pop(self._fits)
                if self._prefilling is not None:
                    self._begin(self._prefilling)
            request = self._prefilling
            if request is None:
                break
            budget -= self._prefill(request, budget)
            if request.output_ids or request.finish_reason is not None:
                started.append(request)
                self._join(request)
        return started

    def _fits(self, request: Request) -> bool:
        """Whether the cache has room for all that this and the running requests may come to."""
        limit = self._settings.cache_tokens
        return limit is None or sum(each.most_tokens for each in (request, *self._running)) <= limit

    def _begin(self, request: Request) -> None:
        slot = len(self._running)
        self._cache.truncate(slot, 0)
        if request.prefix is not None:
            self._cache.copy(slot, request.prefix, 0)
        if self._speculation is not None:
            self._speculation.drafter.begin(slot)

    def _prefill(self, request: Request, most: int) -> int:
        """Computes the next tokens of a prompt, ``most`` at most; returns how many."""
        most = min(most, self._target.most_prompt_tokens or most)
        slot = len(self._running)
        prompt = request.prompt_ids
        start = int(self._cache.lengths[TARGET, slot])
        chunk = prompt[start : start + most]
        following = prompt[start + 1 : start + 1 + len(chunk)]
        try:
            verification = self._target.prefill(slot, TokenRun(chunk, len(prompt)))
            if len(following) < len(chunk):
                following += request.emit([request.sampler.next_token(verification.scores)])
        except DSparkError as error:  # a graph may fail on this prompt alone
            self._fail(slot, request, error)
            return len(chunk)
        self._commit(slot, verification, 0, following)
        return len(chunk)

    def _join(self, request: Request) -> None:
        """Makes a request whose prompt is computed a running one, unless it has ended already."""
        self._prefilling = None
        self._running.append(request)
        if request.finish_reason is not None:
            self._leave(request)

    def _round(self) -> list[Request]:
        """Drafts, schedules, verifies and commits once for every running request."""
        start, requests = perf_counter(), list(self._running)
        batch = self._batch()
        proposal = self._propose(requests, batch)
        lengths = self._schedule(proposal, batch)
        outcomes: list[Round] = []
        drafts = [proposal.tokens[index, :length] if proposal else NO_TOKENS for index, length in enumerate(lengths)]
        runs = [
            TokenRun([request.anchor, *draft], len(request.prompt_ids))
            for request, draft in zip(requests, drafts, strict=True)
        ]
        verification = self._target.verify(runs)
        for index, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            drawn_from = proposal.drawn_from(index, len(draft)) if proposal else (None, None)
            try:
                accepted, tokens = request.sampler.accept(verification.scores_of(index), draft, *drawn_from)
            except NumericalError as error:
                self._fail(index, request, error)
                continue
            taken = request.emit(tokens)
            request.record_round(len(draft), min(accepted, len(taken)))
            if proposal and batch.limits[index]:
                confidence = None if proposal.confidence is None else proposal.confidence[index].copy()
                ended = accepted == len(tokens)  # nothing follows an accepted stop token
                outcomes.append(Round(len(draft), accepted, ended, confidence))
                request.rounds.append(outcomes[-1])
            self._commit(index, verification, index, taken)
        if self._speculation and (outcomes or not proposal):
            self._speculation.scheduler.observe(outcomes, perf_counter() - start)
        for request in requests:
            if request.finish_reason is not None:
                self._leave(request)
        return requests

    def _batch(self) -> Batch:
        """What the scheduler has to know of the running requests; a last token needs no draft."""
        most = self._speculation.max_draft_tokens if self._speculation else 0
        if self._settings.step_tokens is not None:
            most = min(most, max(self._settings.step_tokens // len(self._running) - 1, 0))
        remaining = np.array([request.remaining for request in self._running], np.int64)
        lengths = self._cache.lengths[TARGET, : len(self._running)]
        # A step writes as many rows of every request as of that with the longest draft.
        spare = (lengths + remaining).max() - lengths.max()
        return Batch(
            limits=np.where(remaining > 1, most, 0),
            greedy=np.array([request.sampler.greedy for request in self._running]),
            context_length=self._cache.capacity,
            useful=np.minimum(remaining, spare) - 1,
        )

    def _propose(self, requests: Sequence[Request], batch: Batch) -> Proposal | None:
        """Drafts for all requests, if the scheduler wants it."""
        if self._speculation is None or not self._speculation.scheduler.drafts(batch):
            return None
        length = self._speculation.draft_length
        return self._speculation.drafter.propose(
            [
                DraftInput(request.anchor, request.sampler.draft_uniforms(length), request.sampler.draft_temperature)
                for request in requests
            ]
        )

    def _schedule(self, proposal: Proposal | None, batch: Batch) -> NDArray[np.int64]:
        if proposal is None or self._speculation is None:
            return np.zeros(batch.requests, np.int64)
        with self._clock.phase("schedule"):
            confidence = proposal.confidence
            if confidence is not None:
                confidence = confidences(confidence, self._speculation.confidence_temperatures)
            return self._speculation.scheduler.schedule(confidence, batch)

    def _commit(self, slot: int, verification: Verification, index: int, following: Sequence[int]) -> None:
        """Keeps the rows of the tokens before ``following``; the rest of the step is forgotten."""
        self._target.commit(slot, verification, index, len(following))
        if self._speculation is not None:
            self._speculation.drafter.commit(slot, verification, index, following)

    def _fail(self, slot: int, request: Request, error: DSparkError) -> None:
        """Ends a request that cannot go on, and leaves no values in the cache that are not finite."""
        request.fail(error)
        self._cache.clear_tail(slot)

    def _leave(self, request: Request) -> None:
        """Frees a running request's slot and closes the gap."""
        slot, last = self._running.index(request), len(self._running) - 1
        if request.keep_cache and request.failure is None:
            request.cache = self._cache.extract(slot)
        if slot != last:
            self._move(slot, last)
            self._running[slot] = self._running[last]
        self._running.pop()
        if self._prefilling is not None:
            self._move(last, last + 1)
        else:
            self._cache.truncate(last, 0)
        self._cache.trim()

    def _move(self, slot: int, source: int) -> None:
        self._cache.copy(slot, self._cache, source)
        self._cache.truncate(source, 0)
        if self._speculation is not None:
            self._speculation.drafter.move(slot, source)
