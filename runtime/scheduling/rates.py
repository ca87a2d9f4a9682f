"""Running acceptance rates, which stand in for confidences where there is no confidence head."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.decoding.rounds import Round, RoundTable

__all__ = ["AcceptanceRates"]

FORGETTING = 1 / 64
"""Part of the evidence that each round forgets, so that positions which are verified no more are tried again."""
PRIOR_RATE, PRIOR_WEIGHT = 0.8, 2.0
"""The rate believed before anything is seen, and how many tokens' worth of evidence that is."""


class AcceptanceRates:
    """How often the token at each position was accepted if all before it were, in earlier rounds of all requests.

    Args:
        draft_length: γ.
    """

    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length
        self._reached = np.zeros(draft_length)
        self._accepted = np.zeros(draft_length)

    @property
    def values(self) -> NDArray[np.float32]:
        """The rates, float32 ``[γ]``."""
        rates = (self._accepted + PRIOR_RATE * PRIOR_WEIGHT) / (self._reached + PRIOR_WEIGHT)
        return rates.astype(np.float32)

    def update(self, rounds: Sequence[Round]) -> None:
        """Takes in what became of one round's drafts."""
        table = RoundTable.of(rounds, self._draft_length, confidence=False)
        for total, found in ((self._reached, table.reached), (self._accepted, table.survived)):
            total *= 1 - FORGETTING
            total += found.sum(axis=0)
