"""How many draft tokens of each request a step verifies.

A scheduler sees one round's confidences and decides; any decision that depends only on tokens before the cut keeps the
output's distribution (SEMANTICS: hardware-aware prefix scheduler).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["FixedScheduler", "Scheduler", "ThresholdScheduler"]


class Scheduler(Protocol):
    """Chooses prefix lengths."""

    def schedule(self, confidence: NDArray[np.float32] | None, limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Chooses how many draft tokens of each request are verified.

        Args:
            confidence: Probability ``[R, γ]`` that a token survives if all before it did; None without a confidence
                head.
            limits: int64 ``[R]``: the most that each request can use.

        Returns:
            int64 ``[R]``, between 0 and the limits.
        """


@dataclass(frozen=True)
class FixedScheduler:
    """Verifies the same number of tokens always."""

    def schedule(self, confidence: NDArray[np.float32] | None, limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the limits."""
        return limits


@dataclass(frozen=True)
class ThresholdScheduler:
    """Cuts before the first token whose confidence is below a constant.

    Attributes:
        threshold: The constant, a probability.
    """

    threshold: float

    def schedule(self, confidence: NDArray[np.float32] | None, limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the lengths of the confident prefixes, at most the limits."""
        assert confidence is not None, "the engine refuses this scheduler for bundles without a confidence head"
        confident = np.logical_and.accumulate(confidence >= self.threshold, axis=1)
        lengths: NDArray[np.int64] = confident.sum(axis=1)
        return np.minimum(lengths, limits)
