"""What became of drafts: rounds as they are recorded, and many of them as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.errors import NumericalError

__all__ = ["Round", "RoundTable"]


@dataclass(frozen=True)
class Round:
    """One draft of one request; rounds for which nothing was drafted leave none.

    Attributes:
        verified: Draft tokens that the target checked.
        accepted: Those that stood, whether or not the request's limit or a stop string cut them off afterwards.
        ended: Whether the last of these was a stop token: tokens verified behind it are neither accepted nor rejected.
        confidence: Logits of all draft tokens, float32 ``[γ]``, not calibrated; None without a confidence head.
    """

    verified: int
    accepted: int
    ended: bool
    confidence: NDArray[np.float32] | None


@dataclass(frozen=True)
class RoundTable:
    """Rounds in columns; positions count from 0 here.

    Attributes:
        verified: int64 ``[N]``, as in ``Round``.
        accepted: int64 ``[N]``, as in ``Round``.
        decided: int64 ``[N]``: verified tokens whose fate is known.
        confidence: float32 ``[N, γ]``; None without a confidence head.
        draft_length: γ.
    """

    verified: NDArray[np.int64]
    accepted: NDArray[np.int64]
    decided: NDArray[np.int64]
    confidence: NDArray[np.float32] | None
    draft_length: int

    @classmethod
    def of(cls, rounds: Sequence[Round], draft_length: int, *, confidence: bool) -> "RoundTable":
        """Tabulates rounds.

        Args:
            rounds: The rounds, of one drafter.
            draft_length: γ.
            confidence: Whether the drafter has a confidence head.

        Raises:
            NumericalError: A confidence is not a finite number.
        """
        logits = np.array([item.confidence for item in rounds if item.confidence is not None], np.float32)
        if not np.isfinite(logits).all():
            raise NumericalError("the confidence head returned a value that is not a finite number")
        return cls(
            verified=np.array([item.verified for item in rounds], np.int64),
            accepted=np.array([item.accepted for item in rounds], np.int64),
            decided=np.array([item.accepted if item.ended else item.verified for item in rounds], np.int64),
            confidence=logits.reshape(-1, draft_length) if confidence else None,
            draft_length=draft_length,
        )

    def __len__(self) -> int:
        return len(self.verified)

    @property
    def observed(self) -> NDArray[np.bool_]:
        """``[N, γ]``: whether it is known if the draft survived up to and with this position."""
        return np.arange(self.draft_length) < self.decided[:, None]

    @property
    def reached(self) -> NDArray[np.bool_]:
        """``[N, γ]``: whether the token itself was accepted or rejected, all before it having been accepted."""
        return self.observed & (np.arange(self.draft_length) <= self.accepted[:, None])

    @property
    def survived(self) -> NDArray[np.bool_]:
        """``[N, γ]``: whether the draft was accepted up to and with this position."""
        return np.arange(self.draft_length) < self.accepted[:, None]
