"""One round of all running requests: draft, schedule, verify, accept, commit."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.bundle.calibration import confidences
from dspark.runtime.cache.key_value_cache import TARGET, KeyValueCache
from dspark.runtime.decoding.rounds import Round
from dspark.runtime.engine.request import Request
from dspark.runtime.engine.settings import EngineSettings
from dspark.runtime.engine.slots import Slots
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.drafter import Drafter, DraftInput, Proposal
from dspark.runtime.model.target import Target, TokenRun, Verification
from dspark.runtime.scheduling.scheduler import Batch, Scheduler

__all__ = ["DecodingRound", "Speculation"]

NO_TOKENS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Speculation:
    """How the engine drafts.

    Attributes:
        drafter: Proposes tokens.
        scheduler: Chooses how many are verified.
        max_draft_tokens: The most that are verified of one draft.
        draft_length: Tokens per draft (γ).
        confidence_temperatures: Divisor of the confidence logit at each position, float32 ``[γ]``.
    """

    drafter: Drafter
    scheduler: Scheduler
    max_draft_tokens: int
    draft_length: int
    confidence_temperatures: NDArray[np.float32]


class DecodingRound:
    """Moves every running request on by at least one token.

    Args:
        target: Verifies.
        cache: Tells how long the texts are.
        slots: The running requests.
        speculation: How to draft; None decodes plainly.
        clock: Tells where the time goes.
        settings: How many tokens a step carries.
    """

    def __init__(
        self,
        target: Target,
        cache: KeyValueCache,
        slots: Slots,
        speculation: Speculation | None,
        clock: PhaseClock,
        settings: EngineSettings,
    ) -> None:
        self._target = target
        self._cache = cache
        self._slots = slots
        self._speculation = speculation
        self._clock = clock
        self._settings = settings

    def run(self) -> list[Request]:
        """Runs one round; a call that fails ends the requests that it was for.

        Returns:
            The requests of the round.
        """
        start, requests = perf_counter(), list(self._slots.running)
        batch = self._batch()
        try:
            proposal = self._propose(requests, batch)
            drafts = self._scheduled(proposal, batch)
            verification = self._verify(requests, drafts)
        except Exception as error:  # a library may fail in any way; other requests must not wait for ever
            for slot, request in enumerate(requests):
                self._slots.fail(slot, request, error)
            self._slots.leave_ended(requests)
            return requests
        outcomes: list[Round] = []
        for index, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            drawn_from = proposal.drawn_from(index, len(draft)) if proposal else (None, None)
            try:
                accepted, tokens = request.sampler.accept(verification.scores_of(index), draft, *drawn_from)
            except Exception as error:  # scores that are not finite, or that cannot be read from the device
                self._slots.fail(index, request, error)
                continue
            taken = request.emit(tokens)
            request.record_round(len(draft), min(accepted, len(taken)))
            if proposal and batch.limits[index]:
                confidence = None if proposal.confidence is None else proposal.confidence[index].copy()
                ended = accepted == len(tokens)  # nothing follows an accepted stop token
                outcomes.append(Round(len(draft), accepted, ended, confidence))
                request.rounds.append(outcomes[-1])
            self._slots.commit(index, verification, index, taken)
        if self._speculation and (outcomes or not proposal):
            self._speculation.scheduler.observe(outcomes, perf_counter() - start)
        self._slots.leave_ended(requests)
        return requests

    def _batch(self) -> Batch:
        """What the scheduler has to know of the running requests; a last token needs no draft."""
        running = self._slots.running
        most = self._speculation.max_draft_tokens if self._speculation else 0
        if self._settings.step_tokens is not None:
            most = min(most, max(self._settings.step_tokens // len(running) - 1, 0))
        remaining = np.array([request.remaining for request in running], np.int64)
        lengths = self._cache.lengths[TARGET, : len(running)]
        # A step writes as many rows of every request as of that with the longest draft.
        spare = (lengths + remaining).max() - lengths.max()
        return Batch(
            limits=np.where(remaining > 1, most, 0),
            greedy=np.array([request.sampler.greedy for request in running]),
            context_length=self._cache.capacity,
            useful=np.minimum(remaining, spare) - 1,
        )

    def _propose(self, requests: Sequence[Request], batch: Batch) -> Proposal | None:
        """Drafts for all requests, if the scheduler wants it."""
        if self._speculation is None or not self._speculation.scheduler.drafts(batch):
            return None
        length = self._speculation.draft_length
        return self._speculation.drafter.draft(
            [
                DraftInput(request.anchor, request.sampler.draft_uniforms(length), request.sampler.draft_temperature)
                for request in requests
            ]
        )

    def _scheduled(self, proposal: Proposal | None, batch: Batch) -> list[NDArray[np.int64]]:
        """The draft tokens of each request that the scheduler wants verified."""
        if proposal is None or self._speculation is None:
            return [NO_TOKENS] * batch.requests
        with self._clock.phase("schedule"):
            confidence = proposal.confidence
            if confidence is not None:
                confidence = confidences(confidence, self._speculation.confidence_temperatures)
            lengths = self._speculation.scheduler.schedule(confidence, batch)
        return [proposal.tokens[index, :length] for index, length in enumerate(lengths)]

    def _verify(self, requests: Sequence[Request], drafts: Sequence[NDArray[np.int64]]) -> Verification:
        """One step of the target over every request's last token and its draft."""
        return self._target.verify(
            [
                TokenRun([request.anchor, *draft], len(request.prompt_ids))
                for request, draft in zip(requests, drafts, strict=True)
            ]
        )
