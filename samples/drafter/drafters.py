"""Drafters in PyTorch, for training: many drafts a conversation, each from its own anchor, in one pass.

Parameters carry DeepSpec's names. Embedding and LM head are the target's, frozen, and not part of a drafter's state.
The drafts see the conversation's own tokens as if they had drafted them (teacher forcing).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from config import DraftConfig
from features import Rows
from heads import ConfidenceHead, MarkovHead
from layers import Attention, FeedForward, RMSNorm, Turns, turns
from torch import Tensor, nn

from dspark.exporter.checkpoints.description import DrafterKind

__all__ = ["BlockDrafter", "Drafted", "Drafter", "Eagle3Drafter", "make_drafter"]


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


class DraftLayer(nn.Module):
    """What the decoder layers of all drafters have.

    Args:
        config: Sizes.
        inputs: Width of what attention reads.
    """

    def __init__(self, config: DraftConfig, inputs: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.self_attn = Attention(config, inputs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp = FeedForward(config)

    def feed_forward(self, x: Tensor) -> Tensor:
        """``x [..., H]`` plus what the MLP makes of it."""
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """What all drafters have; the heads are DSpark's only.

    Args:
        config: What it is.
        embedding: The target's, ``[V, H]``.
        layers: Its decoder layers.
    """

    def __init__(self, config: DraftConfig, embedding: Tensor, layers: Sequence[DraftLayer]) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("embedding", embedding, persistent=False)
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None

    def forward(self, rows: Rows, anchors: Tensor) -> Drafted:
        """Drafts from every anchor, which must not be a conversation's first token.

        Args:
            rows: Conversations.
            anchors: Positions int64 ``[B, A]``.
        """
        raise NotImplementedError


class BlockLayer(DraftLayer):
    """A decoder layer of a parallel backbone: sees the context's rows and the whole block.

    Args:
        config: Sizes.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, config.hidden_size)

    def forward(self, x: Tensor, context: Tensor, context_turns: Turns, block_turns: Turns, visible: Tensor) -> Tensor:
        """The block stream after this layer, ``[B, A, γ, H]``."""
        attention, normed = self.self_attn, self.input_layernorm(x)
        rows = attention.keys(context, context_turns), attention.values(context)
        own = attention.keys(normed, block_turns), attention.values(normed)
        return self.feed_forward(x + attention(attention.queries(normed, block_turns), rows, visible, [own]))


class BlockDrafter(Drafter):
    """DSpark and DFlash (paper, section on the parallel backbone): a block in one pass.

    Args:
        config: What it is.
        embedding: The target's, ``[V, H]``.
    """

    def __init__(self, config: DraftConfig, embedding: Tensor) -> None:
        super().__init__(config, embedding, [BlockLayer(config) for _ in range(config.layers)])
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        if config.kind is DrafterKind.DSPARK:
            self.markov_head = MarkovHead(config)
            self.confidence_head = ConfidenceHead(config)

    def context(self, taps: Tensor) -> Tensor:
        """The context feature ``[B, L, H]`` of every token."""
        return self.hidden_norm(self.fc(taps))

    def forward(self, rows: Rows, anchors: Tensor) -> Drafted:
        """See ``Drafter``."""
        size, length = self.config.block_size, rows.ids.shape[1]
        positions = torch.arange(length, device=anchors.device)
        slots = anchors[..., None] + positions.new_tensor(range(size))
        visible = positions < anchors[..., None]
        block = torch.full_like(slots, self.config.mask_token_id)
        block[..., 0] = rows.ids.gather(1, anchors)
        x = self.embedding[block]
        context = self.context(rows.taps)
        context_turns, block_turns = (turns(places, self.config, x.dtype) for places in (positions, slots))
        for layer in self.layers:
            x = layer(x, context, context_turns, block_turns, visible)
        hidden = self.norm(x)
        if self.markov_head is None or self.confidence_head is None:
            return Drafted(hidden, None, None)
        before = rows.ids.gather(1, slots.clamp(max=length - 1).flatten(1)).view(slots.shape)
        embedded = self.markov_head.markov_w1(before)
        return Drafted(hidden, self.markov_head(hidden, embedded), self.confidence_head(hidden, embedded))


class Eagle3Layer(DraftLayer):
    """EAGLE-3's decoder layer: attends from token and feature side by side.

    Args:
        config: Sizes.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)

    def joined(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """What attention reads, ``[…, 2H]``."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)


class Eagle3Drafter(Drafter):
    """EAGLE-3 (Li et al., 2025): token by token, its own hidden state standing in for the target's feature.

    Args:
        config: What it is.
        embedding: The target's, ``[V, H]``.
    """

    def __init__(self, config: DraftConfig, embedding: Tensor) -> None:
        super().__init__(config, embedding, [Eagle3Layer(config)])

    def forward(self, rows: Rows, anchors: Tensor) -> Drafted:
        """See ``Drafter``."""
        layer = self.layers[0]
        attention = layer.self_attn
        length = rows.ids.shape[1]
        positions = torch.arange(length, device=anchors.device)
        features = self.fc(rows.taps)
        # The feature of token i goes with token i + 1, at position i; the last has no token yet, and nobody sees it.
        following = self.embedding[rows.ids.roll(-1, dims=1)]
        joined = layer.joined(following, features)
        context = attention.keys(joined, turns(positions, self.config, joined.dtype)), attention.values(joined)
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
            now_turns = turns(place, self.config, x.dtype)
            if step > 0:  # before that its row is the context's last
                own.append((attention.keys(now, now_turns), attention.values(now)))
            x = layer.feed_forward(x + attention(attention.queries(now, now_turns), context, visible, own))
            hidden.append(x)
        return Drafted(self.norm(torch.cat(hidden, dim=2)), None, None)


def make_drafter(config: DraftConfig, embedding: Tensor) -> Drafter:
    """An untrained drafter."""
    return Eagle3Drafter(config, embedding) if config.kind is DrafterKind.EAGLE3 else BlockDrafter(config, embedding)
