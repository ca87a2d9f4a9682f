"""Whether to draft: as long as it pays, and now and then when it does not, to see whether it would."""

from math import ceil

__all__ = ["TRIALS", "DraftPause"]

MEMORY = 16
"""Requests' rounds that count in the average: acceptance is noisy, but what a text is like changes within sentences."""
OPTIMISM = 2.0
"""Tokens that a draft is believed to give before anything is known."""
TRIALS = 0.01
"""Part of the time that trials may cost while drafting does not pay."""


class DraftPause:
    """Compares drafting with plain decoding, by what it really gave.

    When it loses, drafting pauses for as long as it takes to make up for what a trial loses. A draft after a pause
    counts as much as the rounds it stands for. Only what earlier rounds gave decides.
    """

    def __init__(self) -> None:
        self._tokens = OPTIMISM
        self._cost: float | None = None
        self._pause = 0
        self._waited = 0

    def over(self) -> bool:
        """Whether the next round drafts; called once a round."""
        if self._waited < self._pause:
            self._waited += 1
            return False
        return True

    def record(self, requests: int, tokens: float, cost: float) -> None:
        """Notes a round that drafted.

        Args:
            requests: Requests that it was for.
            tokens: Tokens that it gave a request, on average; plain decoding gives 1.
            cost: Its time over that of a plain round.
        """
        evidence = requests * (self._waited + 1)
        weight = evidence / (evidence + MEMORY - 1)
        self._tokens += weight * (tokens - self._tokens)
        self._cost = cost if self._cost is None else self._cost + weight * (cost - self._cost)
        self._pause = ceil(max(self._cost - self._tokens, 0) / TRIALS)
        self._waited = 0
