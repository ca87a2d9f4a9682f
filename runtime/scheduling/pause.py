"""Decides when to draft: as long as it pays, and now and then when it does not, to see if it would again."""

from collections import deque
from math import ceil
from statistics import median

__all__ = ["PLAIN_EVERY", "TRIALS", "DraftPause"]

MEMORY = 16
"""Rounds that count: a text changes its character within sentences."""
HONESTY_MEMORY = 256
"""Rounds over which predicted and observed acceptance are compared."""
HONESTY_PRIOR = 20.0
"""Draft tokens for which predictions are believed before anything is known."""
OPTIMISM = 2.0
"""Tokens that a draft is believed to give before anything is known."""
PRIOR = 2
"""Drafts that this belief, or the experience with fewer requests, counts for."""
TRUST = 4
"""The expected times count as much as this many comparisons with real rounds: a shape's first rounds are slow."""
MARGIN = 1.05
"""Drafting must gain this much: around the point where both are equal, noise would decide, and at times wrongly."""
TRIALS = 0.01
"""Part of the time that trials may cost while drafting does not pay."""
PLAIN_EVERY = 64
"""Rounds that draft between two that do not and so time plain decoding; fewer at first."""
FIRST_PLAIN = 2


class DraftPause:
    """Compares drafting with plain decoding, by their times and by the tokens that drafts promise.

    Promises are scaled by observed over predicted acceptance. The tokens that a draft really gave would be a much
    noisier measure: of two like drafts one gives nothing, the other three tokens. When drafting loses, it pauses for as
    long as it takes to make up for what a trial loses. A draft after a pause counts as much as the rounds it stands
    for. Only earlier rounds decide.

    Args:
        fewer: What is known for fewer requests, to begin with: more of them do not make drafting cheaper.
        timed: Whether rounds are timed; then a few that could draft do not, and show what that takes.
    """

    def __init__(self, fewer: "DraftPause | None" = None, *, timed: bool = True) -> None:
        self._timed = timed
        self._tokens: float = fewer._tokens if fewer else OPTIMISM
        self._evidence = PRIOR
        self._promised: float = fewer._promised if fewer else HONESTY_PRIOR
        self._kept: float = fewer._kept if fewer else HONESTY_PRIOR
        self._cost: float | None = None
        self._pause: int = fewer._pause if fewer else 0
        self._waited = 0
        self._since_plain = 0
        self._plain_every = FIRST_PLAIN
        self._slowness: float | None = None
        self._drafted = False
        self._slower = deque([1.0] * TRUST, maxlen=MEMORY)

    def over(self) -> bool:
        """Whether the next round drafts; called once per round."""
        if self._waited < self._pause or (self._timed and self._since_plain >= self._plain_every):
            self._waited += 1
            self._since_plain = 0
            self._plain_every = min(2 * self._plain_every, PLAIN_EVERY)
            return False
        self._since_plain += 1
        return True

    def record_plain(self, slowness: float) -> None:
        """Notes a round that did not draft: its time over the expected."""
        self._compare(slowness, drafted=False)

    def record(self, requests: int, promised: float, accepted: float, cost: float, slowness: float) -> None:
        """Notes a round that drafted.

        Args:
            requests: Requests that it was for.
            promised: Draft tokens of a request that were expected to be accepted, on average.
            accepted: Those that were.
            cost: Its expected time over that of a plain round.
            slowness: Its time over the expected.
        """
        self._compare(slowness, drafted=True)
        tokens = 1 + promised * self._kept / self._promised
        if promised:
            self._promised += promised - self._promised / HONESTY_MEMORY
            self._kept += accepted - self._kept / HONESTY_MEMORY
        evidence = requests * (self._waited + 1)
        self._evidence = min(self._evidence, MEMORY - 1) + evidence
        weight = evidence / self._evidence
        self._tokens += weight * (tokens - self._tokens)
        self._cost = cost if self._cost is None else self._cost + weight * (cost - self._cost)
        lost = self._cost * median(self._slower) - self._tokens / MARGIN
        self._pause = ceil(max(lost, 0) / TRIALS)
        self._waited = 0

    def _compare(self, slowness: float, *, drafted: bool) -> None:
        """Compares a round with the one before, if one of them drafted; a second later the device may be slower."""
        if self._slowness is not None and drafted != self._drafted:
            self._slower.append(slowness / self._slowness if drafted else self._slowness / slowness)
        self._slowness, self._drafted = slowness, drafted
