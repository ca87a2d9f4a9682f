"""Sequential heads and the confidence head (paper, sections on the Markov head and the confidence head)."""

import torch
from config import DraftConfig, HeadKind
from torch import Tensor, nn

__all__ = ["ConfidenceHead", "MarkovHead"]


class MarkovHead(nn.Module):
    """Adds a bias of low rank to the base logits: what follows the token before.

    Args:
        config: Its kind and sizes.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self._kind = config.head
        self.markov_w1 = nn.Embedding(config.vocabulary_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocabulary_size, bias=False)
        if config.head is HeadKind.GATED:
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if config.head is HeadKind.RNN:
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What ``W2`` turns into the bias.

        Args:
            hidden: ``[…, γ, H]``.
            embedded: ``[…, γ, r]``, ``W1`` of the token before each slot's.

        Returns:
            ``[…, γ, r]``.
        """
        match self._kind:
            case HeadKind.VANILLA:
                return embedded
            case HeadKind.GATED:
                return self.gate_proj(torch.cat([hidden, embedded], dim=-1)).sigmoid() * embedded
            case HeadKind.RNN:
                return self._recur(hidden, embedded)

    def _recur(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(embedded[..., 0, :]), []
        for slot in range(hidden.shape[-2]):
            joint = torch.cat([state, embedded[..., slot, :], hidden[..., slot, :].to(embedded.dtype)], dim=-1)
            gate, candidate, output = self.joint_proj(joint).float().chunk(3, dim=-1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            outputs.append(output.tanh())
        return torch.stack(outputs, dim=-2)

    @torch.no_grad()
    def start_from_bigrams(self, ids: Tensor, responses: Tensor, tokens: int) -> None:
        """Starts from what follows what in the data, which saves most of the training of these tables.

        The bias becomes the best approximation of that rank to the smoothed log ratio of P(next | token) and P(next).

        Args:
            ids: int64 ``[n, L]`` token ids.
            responses: bool ``[n, L]``, the tokens that are predicted.
            tokens: Only so many of the most frequent tokens are looked at; the others get zeros.
        """
        counts = torch.bincount(ids[responses], minlength=len(self.markov_w1.weight))
        frequent = counts.topk(min(tokens, int((counts > 0).sum()))).indices
        index = torch.full_like(counts, -1)
        index[frequent] = torch.arange(len(frequent))
        before, after = index[ids[:, :-1]].flatten(), index[ids[:, 1:]].flatten()
        both = (before >= 0) & (after >= 0) & responses[:, 1:].flatten()
        pairs = torch.bincount(before[both] * len(frequent) + after[both], minlength=len(frequent) ** 2)
        table = pairs.view(len(frequent), -1).float()
        share = counts[frequent] / counts[frequent].sum()
        smoothed = (table + SMOOTHING * share) / (table.sum(dim=1, keepdim=True) + SMOOTHING)
        ratio = smoothed.log() - share.log()
        rank = self.markov_w1.weight.shape[1]
        u, s, v = torch.svd_lowrank(ratio, q=min(rank + 16, len(frequent)), niter=4)
        rank = min(rank, s.shape[0])
        self.markov_w1.weight.zero_()
        self.markov_w2.weight.zero_()
        self.markov_w1.weight[frequent, :rank] = u[:, :rank] * s[:rank].sqrt()
        self.markov_w2.weight[frequent, :rank] = v[:, :rank] * s[:rank].sqrt()


SMOOTHING = 8.0
"""Imagined occurrences of every token, spread like all tokens."""


class ConfidenceHead(nn.Module):
    """Rates each draft token.

    Args:
        config: Sizes.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Logits ``[…, γ]``."""
        return self.proj(torch.cat([hidden, embedded.to(hidden.dtype)], dim=-1)).squeeze(-1)
