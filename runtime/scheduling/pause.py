"""Whether to draft: as long as it pays, and now and then when it does not, to see whether it would."""

from collections import deque
from math import ceil
from statistics import median

__all__ = ["PLAIN_EVERY", "TRIALS", "DraftPause"]

MEMORY = 16
"""Rounds that count: acceptance is noisy, but what a text is like changes within sentences."""
OPTIMISM = 2.0
"""Tokens that a draft is believed to give before anything is known."""
PRIOR = 2
"""Drafts that this belief, or what fewer requests showed, counts for."""
MARGIN = 1.05
"""What drafting must gain: around the point where both are equal, noise would decide, and at times wrongly."""
TRIALS = 0.01
"""Part of the time that trials may cost while drafting does not pay."""
PLAIN_EVERY = 64
"""Rounds that draft between two that do not, which tell what plain decoding takes now; fewer at first."""
FIRST_PLAIN = 2


class DraftPause:
    """Compares drafting with plain decoding, by what both really gave and took.

    When drafting loses, it pauses for as long as it takes to make up for what a trial loses. A draft after a pause
    counts as much as the rounds it stands for. Only what earlier rounds gave decides.

    Args:
        fewer: What is known for fewer requests, to begin with: more of them do not make drafting cheaper.
        timed: Whether rounds are timed; then a few that could draft do not, and show what that takes.
    """

    def __init__(self, fewer: "DraftPause | None" = None, *, timed: bool = True) -> None:
        self._timed = timed
        self._tokens: float = fewer._tokens if fewer else OPTIMISM
        self._evidence = PRIOR
        self._cost: float | None = None
        self._pause: int = fewer._pause if fewer else 0
        self._waited = 0
        self._since_plain = 0
        self._plain_every = FIRST_PLAIN
        self._drafting: deque[float] = deque(maxlen=MEMORY)
        self._plain: deque[float] = deque(maxlen=MEMORY)

    def over(self) -> bool:
        """Whether the next round drafts; called once a round."""
        if self._waited < self._pause or (self._timed and self._since_plain >= self._plain_every):
            self._waited += 1
            self._since_plain = 0
            self._plain_every = min(2 * self._plain_every, PLAIN_EVERY)
            return False
        self._since_plain += 1
        return True

    def record_plain(self, slowness: float) -> None:
        """Notes a round that did not draft: its time over the expected."""
        self._plain.append(slowness)

    def record(self, requests: int, tokens: float, cost: float, slowness: float) -> None:
        """Notes a round that drafted.

        Args:
            requests: Requests that it was for.
            tokens: Tokens that it gave a request, on average; plain decoding gives 1.
            cost: Its expected time over that of a plain round.
            slowness: Its time over the expected.
        """
        self._drafting.append(slowness)
        evidence = requests * (self._waited + 1)
        self._evidence = min(self._evidence, MEMORY - 1) + evidence
        weight = evidence / self._evidence
        self._tokens += weight * (tokens - self._tokens)
        self._cost = cost if self._cost is None else self._cost + weight * (cost - self._cost)
        correction = median(self._drafting) / median(self._plain) if self._plain else 1.0
        lost = self._cost * correction - self._tokens / MARGIN
        self._pause = ceil(max(lost, 0) / TRIALS)
        self._waited = 0
