"""The interface of schedulers, and the two that know neither hardware nor history.

A decision may see anything of earlier rounds and of other requests, but of a request's own draft only tokens before the
one it is about. Then it does not bend the output's distribution (docs/explanation/losslessness.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.decoding.rounds import Round

__all__ = ["Batch", "FixedScheduler", "Scheduler", "ThresholdScheduler"]


@dataclass(frozen=True)
class Batch:
    """The R requests of a round.

    Attributes:
        limits: Draft tokens that each can use at most, int64 ``[R]``.
        greedy: Whether each takes its likeliest tokens, so that its output does not depend on the schedule, ``[R]``.
        context_length: Cached tokens that the step's attention reads of each request, padding included.
        useful: Draft tokens beyond which each could not emit them any more, or the cache would have to be longer for
            them than for what will be kept, int64 ``[R]``; None if there is no end in sight.
    """

    limits: NDArray[np.int64]
    greedy: NDArray[np.bool_]
    context_length: int
    useful: NDArray[np.int64] | None = None

    @property
    def requests(self) -> int:
        """R."""
        return len(self.limits)

    @cached_property
    def without_useless(self) -> "Batch":
        """The batch limited to draft tokens that are useful."""
        return self if self.useful is None else replace(self, limits=np.minimum(self.limits, self.useful))


class Scheduler(ABC):
    """Decides for one engine, round after round."""

    def drafts(self, batch: Batch) -> bool:
        """Whether the round drafts at all; called once per round."""
        return bool(batch.limits.any())

    @abstractmethod
    def schedule(self, confidence: NDArray[np.float32] | None, batch: Batch) -> NDArray[np.int64]:
        """Chooses how many draft tokens of each request are verified.

        Args:
            confidence: Probability ``[R, γ]`` that a token survives if all before it did; None without a confidence
                head.
            batch: The requests.

        Returns:
            int64 ``[R]``, between 0 and the limits.
        """

    def observe(self, rounds: Sequence[Round], seconds: float) -> None:  # noqa: B027 - most schedulers have no memory
        """Learns from a round when it ends.

        Args:
            rounds: What became of its drafts; none if it did not draft.
            seconds: What it took, host work included.
        """


class FixedScheduler(Scheduler):
    """Verifies the same number of tokens always."""

    def schedule(self, confidence: NDArray[np.float32] | None, batch: Batch) -> NDArray[np.int64]:
        """Returns the limits."""
        return batch.limits


@dataclass(frozen=True)
class ThresholdScheduler(Scheduler):
    """Cuts before the first token whose confidence is below a constant.

    Attributes:
        threshold: The constant, a probability.
    """

    threshold: float

    def schedule(self, confidence: NDArray[np.float32] | None, batch: Batch) -> NDArray[np.int64]:
        """Returns the lengths of the confident prefixes, at most the limits."""
        assert confidence is not None, "the options refuse this scheduler for bundles without a confidence head"
        confident = np.logical_and.accumulate(confidence >= self.threshold, axis=1)
        lengths: NDArray[np.int64] = confident.sum(axis=1)
        return np.minimum(lengths, batch.limits)
