"""Decoder layers that draft, in PyTorch. Names of parameters are those of DeepSpec's checkpoints."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from config import DraftConfig
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Attention", "FeedForward", "RMSNorm", "Turns", "turns"]

Turns: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines ``[…, n, 1, D / 2]`` of RoPE's angles."""


HIDDEN = -3e4
"""Added to scores of rows that are not seen."""


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight follows its input's precision, so that one fused kernel computes it."""

    def forward(self, x: Tensor) -> Tensor:
        """``[…, H]`` to ``[…, H]``."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def turns(positions: Tensor, config: DraftConfig, dtype: torch.dtype) -> Turns:
    """RoPE at positions ``[…, n]``."""
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    angles = positions[..., None, None] * config.rope_theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, turns: Turns) -> Tensor:
    """Rotates ``[…, n, heads, D]`` in half-split pairs."""
    (first, second), (cosine, sine) = heads.chunk(2, dim=-1), turns
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention over context rows and, beside them, rows of the draft itself.

    Args:
        config: Sizes.
        inputs: Width of what queries, keys and values are made from.
    """

    def __init__(self, config: DraftConfig, inputs: int) -> None:
        super().__init__()
        heads, kv_heads, size = config.attention_heads, config.kv_heads, config.head_dim
        self._shape = (kv_heads, heads // kv_heads, size)
        self.q_proj = nn.Linear(inputs, heads * size, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, eps=config.norm_epsilon)
        self.k_norm = RMSNorm(size, eps=config.norm_epsilon)

    def queries(self, x: Tensor, turns: Turns) -> Tensor:
        """``[…, n, heads, D]`` of ``x [..., n, inputs]``."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self._shape[2]))), turns)

    def keys(self, x: Tensor, turns: Turns) -> Tensor:
        """``[…, n, kv heads, D]``."""
        return rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self._shape[2]))), turns)

    def values(self, x: Tensor) -> Tensor:
        """``[…, n, kv heads, D]``."""
        return self.v_proj(x).unflatten(-1, (-1, self._shape[2]))

    def forward(
        self, queries: Tensor, context: tuple[Tensor, Tensor], visible: Tensor, draft: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attends with every query to its row's visible context and to the rows of its own draft.

        Args:
            queries: ``[B, A, n, heads, D]`` of A drafts a row.
            context: Keys and values ``[B, L, kv heads, D]``.
            visible: bool ``[B, A, L]``, the context that a draft sees.
            draft: Keys and values ``[B, A, m, kv heads, D]``, seen by all queries of their draft; may be empty.

        Returns:
            ``[B, A, n, H]``.
        """
        kv_heads, groups, size = self._shape
        grouped = (queries * size**-0.5).unflatten(-2, (kv_heads, groups)).permute(0, 3, 4, 1, 2, 5)
        batch, _, _, drafts, count, _ = grouped.shape  # [B, kv heads, groups, A, n, D]
        before, rows = context[0].permute(0, 2, 3, 1), context[0].shape[1]
        seen = (grouped.reshape(batch, kv_heads, -1, size) @ before).view(batch, kv_heads, groups, drafts, count, rows)
        seen = seen + torch.where(visible, 0.0, HIDDEN).to(seen.dtype)[:, None, None, :, None, :]
        own = [grouped @ keys.permute(0, 3, 1, 4, 2)[:, :, None] for keys, _ in draft]
        scores = torch.cat([seen, *own], dim=-1)
        weights, *shares = (
            scores.softmax(dim=-1).to(queries.dtype).split([rows, *(part.shape[-1] for part in own)], dim=-1)
        )
        mixed = (weights.reshape(batch, kv_heads, -1, rows) @ context[1].transpose(1, 2)).view(grouped.shape)
        for share, (_, values) in zip(shares, draft, strict=True):
            mixed = mixed + share @ values.permute(0, 3, 1, 2, 4)[:, :, None]
        return self.o_proj(mixed.permute(0, 3, 4, 1, 2, 5).flatten(-3))


class FeedForward(nn.Module):
    """A gated MLP.

    Args:
        config: Sizes.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[…, H]`` to ``[…, H]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
