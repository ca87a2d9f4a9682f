"""Drafters in PyTorch, for training: many drafts a conversation, each from its own anchor, in one pass.

Parameters carry DeepSpec's names. Embedding and LM head are the target's, frozen, and not part of a drafter's state.
The drafts see the conversation's own tokens as if they had drafted them (teacher forcing).
"""

from dataclasses import dataclass

import torch
from config import DraftConfig, Kind
from features import Rows
from heads import ConfidenceHead, MarkovHead
from layers import Attention, FeedForward, RMSNorm
from torch import Tensor, nn

__all__ = ["BlockDrafter", "Drafted", "Eagle3Drafter", "make_drafter"]


@dataclass(frozen=True)
class Drafted:
    """Drafts of A anchors a row.

    Attributes:
        hidden: ``[B, A, γ, H]``, what the LM head reads.
        factors: ``[B, A, γ, r]``, what ``W2`` turns into a bias; None without a sequential head.
        confidence: Logits ``[B, A, γ]``; None without a confidence head.
    """

    hidden: Tensor
    factors: Tensor | None
    confidence: Tensor | None


class BlockLayer(nn.Module):
    """A decoder layer of a parallel backbone: sees the context's rows and the whole block.

    Args:
        config: Sizes.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, context: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
        """The block stream after this layer, ``[B, A, γ, H]``."""
        attention, normed = self.self_attn, self.input_layernorm(x)
        before = attention.turns(torch.arange(context.shape[1], device=x.device), x.dtype)
        block = attention.turns(slots, x.dtype)
        rows = attention.keys(context, before), attention.values(context)
        own = attention.keys(normed, block), attention.values(normed)
        x = x + attention(attention.queries(normed, block), rows, visible, [own])
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockDrafter(nn.Module):
    """DSpark and DFlash (paper, section on the parallel backbone): a block in one pass.

    Args:
        config: What it is.
        embedding: The target's, ``[V, H]``.
    """

    def __init__(self, config: DraftConfig, embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("embedding", embedding, persistent=False)
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        dspark = config.kind is Kind.DSPARK
        self.markov_head = MarkovHead(config) if dspark else None
        self.confidence_head = ConfidenceHead(config) if dspark else None

    def context(self, taps: Tensor) -> Tensor:
        """The context feature ``[B, L, H]`` of every token."""
        return self.hidden_norm(self.fc(taps))

    def forward(self, rows: Rows, anchors: Tensor) -> Drafted:
        """Drafts from every anchor.

        Args:
            rows: Conversations.
            anchors: Positions int64 ``[B, A]``.
        """
        size, length = self.config.block_size, rows.ids.shape[1]
        positions = torch.arange(length, device=anchors.device)
        slots = anchors[..., None] + positions.new_tensor(range(size))
        visible = positions < anchors[..., None]
        block = torch.full_like(slots, self.config.mask_token_id)
        block[..., 0] = rows.ids.gather(1, anchors)
        x = self.embedding[block]
        context = self.context(rows.taps)
        for layer in self.layers:
            x = layer(x, context, slots, visible)
        hidden = self.norm(x)
        if self.markov_head is None or self.confidence_head is None:
            return Drafted(hidden, None, None)
        before = rows.ids.gather(1, slots.clamp(max=length - 1).flatten(1)).view(slots.shape)
        embedded = self.markov_head.markov_w1(before)
        return Drafted(hidden, self.markov_head(hidden, embedded), self.confidence_head(hidden, embedded))


class Eagle3Layer(nn.Module):
    """EAGLE-3's decoder layer: attends from token and feature side by side.

    Args:
        config: Sizes.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp = FeedForward(config)

    def joined(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """What attention reads, ``[…, 2H]``."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)


class Eagle3Drafter(nn.Module):
    """EAGLE-3 (Li et al., 2025): token by token, its own hidden state standing in for the target's feature.

    Args:
        config: What it is.
        embedding: The target's, ``[V, H]``.
    """

    def __init__(self, config: DraftConfig, embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("embedding", embedding, persistent=False)
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)

    def forward(self, rows: Rows, anchors: Tensor) -> Drafted:
        """Drafts from every anchor, which must not be a conversation's first token.

        Args:
            rows: Conversations.
            anchors: Positions int64 ``[B, A]``.
        """
        layer = self.layers[0]
        attention = layer.self_attn
        length = rows.ids.shape[1]
        positions = torch.arange(length, device=anchors.device)
        features = self.fc(rows.taps)
        # The feature of token i goes with token i + 1, at position i; the last has no token yet, and nobody sees it.
        following = self.embedding[rows.ids.roll(-1, dims=1)]
        joined = layer.joined(following, features)
        context = attention.keys(joined, attention.turns(positions, joined.dtype)), attention.values(joined)
        visible = positions < anchors[..., None]

        def at(values: Tensor) -> Tensor:
            index = (anchors - 1)[..., None].expand(-1, -1, values.shape[-1])
            return values.gather(1, index)[:, :, None]

        x, now, place = at(features), at(joined), (anchors - 1)[..., None]
        own: list[tuple[Tensor, Tensor]] = []
        hidden = []
        for step in range(self.config.block_size):
            if step > 0:
                tokens = rows.ids.gather(1, (anchors + step).clamp(max=length - 1))[..., None]
                now, place = layer.joined(self.embedding[tokens], x), place + 1
                own.append((attention.keys(now, attention.turns(place, x.dtype)), attention.values(now)))
            x = x + attention(attention.queries(now, attention.turns(place, x.dtype)), context, visible, own)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden.append(x)
        return Drafted(self.norm(torch.cat(hidden, dim=2)), None, None)


def make_drafter(config: DraftConfig, embedding: Tensor) -> BlockDrafter | Eagle3Drafter:
    """An untrained drafter."""
    return Eagle3Drafter(config, embedding) if config.kind is Kind.EAGLE3 else BlockDrafter(config, embedding)
