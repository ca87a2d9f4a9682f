"""Whether to draft: as long as it pays, and now and then when it does not, to see whether it would."""

__all__ = ["DraftPause"]

MEMORY = 16
"""Rounds that count in the average: acceptance is noisy, but what a text is like can change within sentences."""
OPTIMISM = 1.25
"""What drafting is believed to gain before anything is known."""
LONGEST = 32
"""Rounds between two trials at most; a trial that fails costs a draft, so its cost is a few percent of one round."""


class DraftPause:
    """Compares drafting with plain decoding, by what it really gave.

    When it loses, drafting pauses for 1, 2, 4 … rounds between trials. A draft after a pause counts as much as the
    rounds it stands for. Only what earlier rounds gave decides.
    """

    def __init__(self) -> None:
        self._tokens = OPTIMISM
        self._cost = 1.0
        self._pause = 0
        self._waited = 0

    def over(self) -> bool:
        """Whether the next round drafts; called once a round."""
        if self._waited < self._pause:
            self._waited += 1
            return False
        return True

    def record(self, tokens: float, cost: float) -> None:
        """Notes a round that drafted.

        Args:
            tokens: Tokens that it gave a request; plain decoding gives 1.
            cost: Its time over that of a plain round.
        """
        elapsed = self._waited + 1
        weight = elapsed / (elapsed + MEMORY - 1)
        self._tokens += weight * (tokens - self._tokens)
        self._cost += weight * (cost - self._cost)
        self._pause = 0 if self._tokens > self._cost else min(max(1, 2 * self._pause), LONGEST)
        self._waited = 0
