"""Schedulers that know what a step costs on this device."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.decoding.rounds import Round
from dspark.runtime.scheduling.pause import DraftPause
from dspark.runtime.scheduling.rates import AcceptanceRates
from dspark.runtime.scheduling.scheduler import Batch, Scheduler
from dspark.runtime.scheduling.search import Candidates, PlanSeconds, best_lengths, best_plan, survivals

__all__ = ["AsyncHardwareScheduler", "HardwareScheduler", "RoundCosts"]

Floats = NDArray[np.float64]
BUDGET_AGE = 2
"""Rounds between the confidences that a budget comes from and its use, as in the paper's serving system."""


class RoundCosts(Protocol):
    """What a round costs, in seconds."""

    def step_seconds(
        self, requests: int, context_length: int, draft_tokens: NDArray[np.int64], longest: NDArray[np.int64]
    ) -> Floats:
        """Time ``[n]`` of steps that verify so many draft tokens beside each request's anchor.

        ``longest`` is the most tokens of one request, its anchor included; attention is padded to them.
        """

    def draft_seconds(self, requests: int, context_length: int) -> float:
        """Time of drafting for so many requests, of each of which attention reads so many cached tokens."""


class HardwareScheduler(Scheduler):
    """Verifies the prefixes that promise most tokens per second, and drafts as long as that beats plain decoding.

    Args:
        costs: What a round costs.
        rates: Stand in for confidences; None if there is a confidence head.
    """

    def __init__(self, costs: RoundCosts, rates: AcceptanceRates | None) -> None:
        self._costs = costs
        self._rates = rates
        self._pauses: dict[bool, dict[int, DraftPause]] = {True: {}, False: {}}
        self._pause = DraftPause()
        self._plain = self._planned = 1.0
        self._promised = 0.0
        self._repeatable = False

    def drafts(self, batch: Batch) -> bool:
        """Not while drafting pauses because it did not pay for about as many requests."""
        self._repeatable = not batch.greedy.all()
        self._pause = self._pause_for(batch.requests)
        (self._plain,) = self._step(batch, np.zeros(1, np.int64), np.ones(1, np.int64))
        return super().drafts(batch.without_useless) and self._pause.over()

    def schedule(self, confidence: NDArray[np.float32] | None, batch: Batch) -> NDArray[np.int64]:
        """Chooses prefix lengths by survival and cost."""
        batch = batch.without_useless
        if self._rates is not None:
            confidence = np.tile(self._rates.values, (batch.requests, 1))
        assert confidence is not None, "a bundle without a confidence head needs rates"
        draft = self._costs.draft_seconds(batch.requests, batch.context_length)

        def cost(verified: NDArray[np.int64], longest: NDArray[np.int64]) -> Floats:
            return self._step(batch, verified, longest) + draft

        survival = survivals(confidence)
        lengths = self._plan(survival, batch, cost)
        if self._rates is not None:  # the rates of what is never verified would never change
            lengths = np.maximum(lengths, np.minimum(batch.limits, 1))
        (self._planned,) = cost(np.array([lengths.sum()]), np.array([1 + lengths.max()]))
        self._promised = float(survival[np.arange(survival.shape[1]) < lengths[:, None]].sum())
        return lengths

    def observe(self, rounds: Sequence[Round], seconds: float) -> None:
        """Learns what the round gave and took."""
        expected = self._planned if rounds else self._plain
        slowness = 1.0 if self._repeatable else seconds / expected
        if not rounds:
            self._pause.record_plain(slowness)
            return
        promised, accepted = self._promised / len(rounds), sum(each.accepted for each in rounds) / len(rounds)
        self._pause.record(len(rounds), promised, accepted, self._planned / self._plain, slowness)
        if self._rates is not None:
            self._rates.update(rounds)

    def _pause_for(self, requests: int) -> DraftPause:
        """The pause for about as many requests."""
        pauses, size = self._pauses[self._repeatable], requests.bit_length()
        if size not in pauses:
            nearest = max((known for known in pauses if known < size), default=None)
            # A clock must not decide on texts that are sampled, or their seeds would be worth nothing.
            pauses[size] = DraftPause(pauses[nearest] if nearest is not None else None, timed=not self._repeatable)
        return pauses[size]

    def _step(self, batch: Batch, verified: NDArray[np.int64], longest: NDArray[np.int64]) -> Floats:
        return self._costs.step_seconds(batch.requests, batch.context_length, verified, longest)

    def _plan(self, survival: Floats, batch: Batch, cost: PlanSeconds) -> NDArray[np.int64]:
        return best_plan(survival, batch, cost)


class AsyncHardwareScheduler(HardwareScheduler):
    """Takes its budget from an older round, by a search without constraint, and spends it in order of survival now.

    Costs with jumps, which end Algorithm 1 too early, do not matter to such a search, and knowledge of earlier rounds
    cannot bend the distribution of this one. The first rounds are planned as ``HardwareScheduler`` does.

    Args:
        costs: What a round costs.
        rates: Stand in for confidences; None if there is a confidence head.
    """

    def __init__(self, costs: RoundCosts, rates: AcceptanceRates | None) -> None:
        super().__init__(costs, rates)
        self._budgets: deque[float] = deque(maxlen=BUDGET_AGE)

    def _plan(self, survival: Floats, batch: Batch, cost: PlanSeconds) -> NDArray[np.int64]:
        candidates = Candidates.of(survival, batch.limits)
        drafting = int(np.count_nonzero(batch.limits))
        budget = self._budgets[0] if len(self._budgets) == BUDGET_AGE else None
        # A request's share, since requests come and go meanwhile.
        self._budgets.append(int(best_lengths(candidates, cost, batch.requests).sum()) / drafting)
        if budget is None:
            return super()._plan(survival, batch, cost)
        return candidates.lengths(round(budget * drafting))
