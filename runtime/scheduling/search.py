"""Searches for the prefixes whose verification gives most tokens per second.

A plan verifies the k candidates of highest survival: survival never rises along a draft, so these are prefixes, and no
other k tokens promise more.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.scheduling.scheduler import Batch

__all__ = ["Candidates", "PlanSeconds", "best_count", "best_lengths", "best_plan", "early_stop_count", "survivals"]

Floats = NDArray[np.float64]
PlanSeconds = Callable[[NDArray[np.int64], NDArray[np.int64]], Floats]
"""Time of rounds by the number of draft tokens verified, and by the most tokens of one request, its anchor included."""
CUTS = (8, 6, 4, 3, 2, 1)
"""Draft tokens of a request."""


def survivals(confidence: NDArray[np.float32]) -> Floats:
    """Probability ``[R, γ]`` that a draft is accepted up to and with each token; 0 from one that is no number on."""
    return np.fmax(np.multiply.accumulate(confidence, axis=1, dtype=np.float64), 0.0)  # fmax takes the number


def _falling(values: Floats) -> NDArray[np.int64]:
    """The order of values from the highest on; of equals the earlier stays first, as it is of the earlier token."""
    order = np.argsort(-values)
    ordered = values[order]
    if (ordered[1:] < ordered[:-1]).all():
        return order
    return np.argsort(-values, kind="stable")  # takes twice as long


@dataclass(frozen=True)
class Candidates:
    """The M draft tokens that could be verified, in order of survival, each request's in the order of its draft.

    Attributes:
        owners: Whose each is, int64 ``[M]``.
        positions: Its place in that draft, from 0, int64 ``[M]``.
        survival: float64 ``[M]``, falling.
        requests: R.
    """

    owners: NDArray[np.int64]
    positions: NDArray[np.int64]
    survival: Floats
    requests: int

    @classmethod
    def of(cls, survival: Floats, limits: NDArray[np.int64]) -> "Candidates":
        """Sorts the tokens ``[R, γ]`` within the requests' limits."""
        owners, positions = np.nonzero(np.arange(survival.shape[1]) < limits[:, None])
        values = survival[owners, positions]
        order = _falling(values)
        return cls(owners[order], positions[order], values[order], len(limits))

    def only(self, kept: NDArray[np.bool_]) -> "Candidates":
        """Some of them, in the same order."""
        places = np.flatnonzero(kept)  # three times by a mask takes twice as long
        return Candidates(self.owners[places], self.positions[places], self.survival[places], self.requests)

    def lengths(self, count: int) -> NDArray[np.int64]:
        """Length of each request's prefix, int64 ``[R]``, if the first ``count`` are verified."""
        return np.bincount(self.owners[:count], minlength=self.requests)

    @property
    def longest(self) -> NDArray[np.int64]:
        """Most tokens of one request ``[M + 1]``, its anchor included, if the first 0…M are verified."""
        longest = np.ones(len(self.positions) + 1, np.int64)
        np.maximum.accumulate(self.positions + 2, out=longest[1:])
        return longest

    def tokens(self, certain: float) -> Floats:
        """Expected tokens ``[M + 1]`` of verifying the first 0…M, beside ``certain`` ones.

        Summed in order, so that no sum depends by a bit on later candidates.
        """
        tokens = np.full(len(self.survival) + 1, certain, np.float64)
        tokens[1:] = self.survival
        return np.cumsum(tokens, out=tokens)


def best_count(tokens: Floats, seconds: Floats) -> int:
    """The count with most tokens per second; of equals the smallest.

    It looks at all candidates, so it is for requests whose output cannot depend on it.
    """
    return int(np.argmax(tokens / seconds))


def early_stop_count(tokens: Floats, seconds: Floats) -> int:
    """The count after which the next candidate no longer gives more tokens per second; ties stop.

    Whether a candidate is verified depends on those before it alone.
    """
    rates = tokens / seconds
    return int(np.argmin(np.append(rates[1:] > rates[:-1], False)))


def best_lengths(
    candidates: Candidates, cost: PlanSeconds, certain: float, verified: int = 0, longest: int = 1
) -> NDArray[np.int64]:
    """The prefix lengths ``[R]`` with most tokens per second, of all that there are.

    Where padding costs, a plan may have to leave out the end of one draft for the beginnings of others, so drafts cut
    at several lengths are searched.

    Args:
        candidates: The tokens to choose from.
        cost: Time of rounds.
        certain: Tokens expected without them.
        verified: Draft tokens of other requests, which are verified in any case.
        longest: Most tokens of one of these requests, its anchor included.
    """
    farthest = int(candidates.positions.max(initial=-1)) + 1
    best, lengths, near = -1.0, candidates.lengths(0), candidates
    for reach in [farthest, *(cut for cut in CUTS if cut < farthest and candidates.requests > 1)]:
        if reach < farthest:
            near = near.only(near.positions < reach)
        counts = np.arange(len(near.owners) + 1)
        tokens = near.tokens(certain)
        seconds = cost(verified + counts, np.maximum(near.longest, longest))
        count = best_count(tokens, seconds)
        if tokens[count] / seconds[count] >= best:  # of equals the shortest drafts
            best, lengths = tokens[count] / seconds[count], near.lengths(count)
    return lengths


def best_plan(survival: Floats, batch: Batch, cost: PlanSeconds) -> NDArray[np.int64]:
    """The prefix lengths ``[R]`` with most tokens per second that may be chosen without bending a distribution.

    Requests that sample are cut by Algorithm 1 of the DSpark paper. Greedy ones are searched without constraint, once
    the others' lengths are fixed.

    Args:
        survival: float64 ``[R, γ]``.
        batch: The requests.
        cost: Time of rounds.
    """
    limits, greedy = batch.limits, batch.greedy
    candidates = Candidates.of(survival, limits)
    if greedy.all():
        return best_lengths(candidates, cost, batch.requests)
    seconds = cost(np.arange(len(candidates.owners) + 1), candidates.longest)
    count = early_stop_count(candidates.tokens(batch.requests), seconds)
    lengths = candidates.lengths(count)
    if not greedy.any():
        return lengths
    sampled = ~greedy[candidates.owners[:count]]
    certain = batch.requests + float(candidates.survival[:count][sampled].sum())
    free = candidates.only(greedy[candidates.owners])
    freed = best_lengths(free, cost, certain, int(sampled.sum()), 1 + int(lengths[~greedy].max()))
    return np.where(greedy, freed, lengths)
