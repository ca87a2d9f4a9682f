"""Drafters: what proposes a block of tokens for every running request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.model.target import Verification

__all__ = ["DraftInput", "Drafter", "Proposal"]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of the requests in slots 0…R − 1: views of buffers that the next proposal overwrites.

    Attributes:
        tokens: Target ids, int64 ``[R, γ]``.
        logits: What they were drawn from, float32 ``[R, γ, K]``; None if they lie on a device and no request draws.
        ids: Target ids of the logits, int64 ``[R, γ, K]``; None when logit i is of token i.
        confidence: Logits of the tokens' survival, float32 ``[R, γ]``; None without a confidence head.
    """

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32] | None
    ids: NDArray[np.int64] | None
    confidence: NDArray[np.float32] | None

    def drawn_from(self, index: int, length: int) -> tuple[NDArray[np.float32] | None, NDArray[np.int64] | None]:
        """Logits and ids of a request's first ``length`` tokens."""
        logits = None if self.logits is None else self.logits[index, :length]
        return logits, None if self.ids is None else self.ids[index, :length]


@dataclass(frozen=True)
class DraftInput:
    """What a request brings to a draft.

    Attributes:
        anchor: Its last token.
        uniforms: Random numbers ``[γ]`` for the draws.
        temperature: Of the draft; 0 takes the likeliest tokens.
    """

    anchor: int
    uniforms: NDArray[np.float32]
    temperature: float

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, and their distribution is needed to accept them, rather than chosen."""
        return self.temperature > 0


class Drafter(Protocol):
    """Follows what the target commits and proposes what might come next."""

    def begin(self, slot: int) -> None:
        """Starts with a new request in a slot."""

    def commit(self, slot: int, verification: Verification, index: int, following: Sequence[int]) -> None:
        """Takes over the context of committed tokens.

        Args:
            slot: The request's slot; its committed tokens go after what it holds.
            verification: The step that computed them.
            index: The request's place in that step.
            following: The token after each committed token.
        """

    def move(self, slot: int, source: int) -> None:
        """Follows a request that moved from one slot to another."""

    def draft(self, inputs: Sequence[DraftInput]) -> Proposal:
        """Drafts a block for the requests in slots 0…R − 1."""
