"""Searches for the prefixes whose verification gives most tokens a second.

A plan verifies the k candidates of highest survival: survival never rises along a draft, so these are prefixes, and no
other k tokens promise more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.scheduling.scheduler import Batch

__all__ = ["Candidates", "best_count", "best_plan", "early_stop_count", "survivals"]

Floats = NDArray[np.float64]


def survivals(confidence: NDArray[np.float32]) -> Floats:
    """Probability ``[R, γ]`` that a draft is accepted up to and with each token; 0 from one that is no number on."""
    return np.fmax(np.multiply.accumulate(confidence, axis=1, dtype=np.float64), 0.0)  # fmax takes the number


@dataclass(frozen=True)
class Candidates:
    """The M draft tokens that could be verified, in order of survival, each request's in the order of its draft.

    Attributes:
        owners: Whose each is, int64 ``[M]``.
        survival: float64 ``[M]``, falling.
        requests: R.
    """

    owners: NDArray[np.int64]
    survival: Floats
    requests: int

    @classmethod
    def of(cls, survival: Floats, limits: NDArray[np.int64]) -> "Candidates":
        """Sorts the tokens ``[R, γ]`` within the requests' limits."""
        owners, positions = np.nonzero(np.arange(survival.shape[1]) < limits[:, None])
        values = survival[owners, positions]
        order = np.argsort(-values, kind="stable")  # among equals a request's earlier token stays first
        return cls(owners[order], values[order], len(limits))

    def lengths(self, count: int) -> NDArray[np.int64]:
        """Length of each request's prefix, int64 ``[R]``, if the first ``count`` are verified."""
        return np.bincount(self.owners[:count], minlength=self.requests)

    def tokens(self, certain: float) -> Floats:
        """Expected tokens ``[M + 1]`` of verifying the first 0…M, beside ``certain`` ones.

        Summed in order, so that no sum depends by a bit on later candidates.
        """
        return np.cumsum(np.concatenate(([certain], self.survival)))


def best_count(tokens: Floats, seconds: Floats) -> int:
    """The count with most tokens a second; of equals the smallest.

    It looks at all candidates, so it is for requests whose output cannot depend on it.
    """
    return int(np.argmax(tokens / seconds))


def early_stop_count(tokens: Floats, seconds: Floats) -> int:
    """The count after which the next candidate no longer gives more tokens a second; ties stop.

    Whether a candidate is verified depends on those before it alone.
    """
    rates = tokens / seconds
    return int(np.argmin(np.append(rates[1:] > rates[:-1], False)))


def best_plan(survival: Floats, batch: Batch, seconds: Floats) -> NDArray[np.int64]:
    """The prefix lengths ``[R]`` with most tokens a second that may be chosen without bending a distribution.

    Requests that sample are cut by Algorithm 1 of the DSpark paper. Greedy ones are searched without constraint, once
    the others' lengths are fixed.

    Args:
        survival: float64 ``[R, γ]``.
        batch: The requests.
        seconds: Time of a round ``[M + 1]`` by the number of draft tokens verified.
    """
    limits, greedy = batch.limits, batch.greedy
    candidates = Candidates.of(survival, limits)
    tokens = candidates.tokens(batch.requests)
    if greedy.all():
        return candidates.lengths(best_count(tokens, seconds))
    count = early_stop_count(tokens, seconds)
    lengths = candidates.lengths(count)
    if not greedy.any():
        return lengths
    sampled = ~greedy[candidates.owners[:count]]
    certain = batch.requests + float(candidates.survival[:count][sampled].sum())
    free = Candidates.of(survival, np.where(greedy, limits, 0))
    offset = int(sampled.sum())
    count = best_count(free.tokens(certain), seconds[offset : offset + len(free.owners) + 1])
    return np.where(greedy, free.lengths(count), lengths)
