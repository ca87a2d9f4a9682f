"""What training minimises (paper, section on training): the draft distribution's distance from the target's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from drafters import Drafted
from features import Rows
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "WHOLE_VOCABULARY",
    "LossVocabulary",
    "LossWeights",
    "Losses",
    "Vocabulary",
    "compare",
    "compute_losses",
    "position_weights",
]

POSITION_DECAY = 4.0
"""Slots count exp(−k / 4): a token is of use only if all before it were accepted."""


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three losses; the defaults are the paper's.

    Attributes:
        cross_entropy: Of the draft distribution under the target's. The paper takes the data's next token for the
            target's distribution; its expectation is the same and has less noise.
        distance: Of Σ|q − p|, twice the total variation: what acceptance falls short by.
        confidence: Of the confidence's binary cross-entropy with the acceptance rate 1 − TV(p, q).
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a softmax is taken over.

    Attributes:
        ids: int64 ``[S]``; None means all.
        log_weights: float32 ``[S]``: every token stands for exp of that many.
    """

    ids: Tensor | None
    log_weights: Tensor | None

    def rows(self, table: Tensor) -> Tensor:
        """Rows of a table ``[V, …]``."""
        return table if self.ids is None else table[self.ids]

    def to(self, device: torch.device) -> "Vocabulary":
        """The same on a device."""
        if self.ids is None or self.log_weights is None:
            return self
        return Vocabulary(self.ids.to(device), self.log_weights.to(device))


WHOLE_VOCABULARY = Vocabulary(None, None)


class LossVocabulary:
    """The most frequent tokens, and a random sample of the others that stands for all of them.

    The softmax over a large vocabulary costs more than all else; nearly all of its mass is on few tokens.

    Args:
        counts: int64 ``[V]``, how often each token occurs.
        frequent: Tokens that are always there; 0 takes all.
        sampled: Others, drawn anew for each step; at least 1 unless the frequent ones are all.
    """

    def __init__(self, counts: Tensor, frequent: int, sampled: int) -> None:
        order = counts.argsort(descending=True, stable=True)
        self._frequent, self._others = order[:frequent].sort().values, order[frequent:]
        self._sampled = sampled
        self._whole = frequent == 0 or frequent + sampled >= len(counts)

    def draw(self, generator: torch.Generator) -> Vocabulary:
        """The tokens of one step."""
        if self._whole:
            return WHOLE_VOCABULARY
        picks = torch.randint(len(self._others), (self._sampled,), generator=generator)
        weights = torch.zeros(len(self._frequent) + self._sampled)
        weights[len(self._frequent) :] = torch.tensor(len(self._others) / self._sampled).log()
        return Vocabulary(torch.cat([self._frequent, self._others[picks]]), weights)


@dataclass(frozen=True)
class Losses:
    """The loss of a step and figures of every slot, valid or not.

    Attributes:
        total: What is minimised: the weighted mean over valid slots.
        acceptance: float32 ``[B, A, γ]``, the probability Σ min(p, q) that a slot's token is accepted.
        agreement: float32 ``[B, A, γ]``, 1 where the likeliest tokens are the same; None on a part of the vocabulary.
        confidence_bias: float32 ``[B, A, γ]``, what the confidence is above the acceptance.
    """

    total: Tensor
    acceptance: Tensor
    agreement: Tensor | None
    confidence_bias: Tensor


def position_weights(valid: Tensor) -> Tensor:
    """Weights float32 ``[B, A, γ]`` of slots, 0 where they are not valid; they sum to 1 if any is valid."""
    decay = torch.exp(-torch.arange(valid.shape[-1], device=valid.device) / POSITION_DECAY)
    weights = valid * decay
    return weights / weights.sum().clamp(min=1e-6)  # a step may have no valid slot


def compute_losses(
    drafted: Drafted,
    rows: Rows,
    anchors: Tensor,
    valid: Tensor,
    lm_head: Tensor,
    bias: nn.Linear | None,
    vocabulary: Vocabulary,
    weights: LossWeights,
    comparison: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]],
) -> Losses:
    """Compares drafts with the target.

    Args:
        drafted: The drafts.
        rows: Their conversations.
        anchors: Where they begin, int64 ``[B, A]``.
        valid: bool ``[B, A, γ]``.
        lm_head: The target's, ``[V, H]``.
        bias: ``W2``; None without a sequential head.
        vocabulary: The tokens to compare on.
        weights: Of the losses.
        comparison: ``compare``, perhaps compiled.
    """
    slots = torch.arange(valid.shape[-1], device=anchors.device)
    places = (anchors[..., None] + slots).clamp(max=rows.ids.shape[1] - 1)
    row = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    table = vocabulary.rows(lm_head)
    target, draft = F.linear(rows.final[row, places], table), F.linear(drafted.hidden, table)
    if drafted.factors is not None and bias is not None:
        draft = draft + F.linear(drafted.factors, vocabulary.rows(bias.weight))
    cross_entropy, distance = comparison(draft, target, vocabulary.log_weights)
    share = position_weights(valid)
    total = weights.distance * (distance * share).sum() + weights.cross_entropy * (cross_entropy * share).sum()
    acceptance = (1 - distance.detach() / 2).clamp(0, 1)
    bias_of_confidence = torch.zeros_like(acceptance)
    if drafted.confidence is not None:
        confidence = drafted.confidence.float()
        surprise = F.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
        total = total + weights.confidence * (surprise * share).sum()
        bias_of_confidence = confidence.detach().sigmoid() - acceptance
    agreement = (draft.argmax(dim=-1) == target.argmax(dim=-1)).float() if vocabulary.ids is None else None
    return Losses(total, acceptance, agreement, bias_of_confidence)


def compare(draft: Tensor, target: Tensor, log_weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cross-entropy and Σ|q − p| of logits ``[…, S]``, float32 ``[…]``."""
    draft, target = draft.float(), target.float()
    if log_weights is not None:
        draft, target = draft + log_weights, target + log_weights
    log_q, p = draft.log_softmax(dim=-1), target.softmax(dim=-1)
    return -(p * log_q).sum(dim=-1), (log_q.exp() - p).abs().sum(dim=-1)
