"""The EAGLE-3 drafter's graph: extends its cache with committed tokens, then drafts token by token.

SEMANTICS: other drafters; Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import FLOAT, INT64, GraphBuilder
from dspark.exporter.graphs.encodings import Encodings
from dspark.exporter.graphs.head import DraftSampler
from dspark.exporter.graphs.layers import (
    AttentionBias,
    BlockTokens,
    KeyValue,
    Rotation,
    after,
    attention,
    cached_rows,
    decoder_layer,
    distances,
    embed,
    feed_forward,
    linear,
    part_sizes,
    rms_norm,
    rotation,
    unsqueeze,
)
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.contract import context_names, delta_names

__all__ = ["build_eagle3_drafter"]


def build_eagle3_drafter(drafter: Drafter, target: Target, weights: WeightFile, encodings: Encodings) -> ir.Model:
    """Builds the drafter's graph (inputs and outputs in ARCHITECTURE.md, "The graphs").

    Args:
        drafter: An EAGLE-3 drafter.
        target: Lends its embedding and LM head where the drafter has none.
        weights: Receives the weights.
        encodings: How they are stored and multiplied with.
    """
    g = GraphBuilder("drafter", weights, encodings)
    backbone, length = drafter.backbone, drafter.draft_length
    layers = range(len(backbone.layers))
    ids = g.input("input_ids", INT64, "B", "T")
    features = g.input("features", FLOAT, "B", "T", backbone.hidden_size)
    positions = g.input("position_ids", INT64, "B", "T")
    last_index = unsqueeze(g, g.input("last_index", INT64, "B"), 1)
    bias_input = g.op("Squeeze", g.input("attention_bias", FLOAT, "B", 1, 1, "T", "S+T"), g.ints(1))
    past = [cached_rows(g, context_names(index), backbone) for index in layers]
    drafting = _Drafting(g, drafter, {**target.tables, **drafter.tensors})

    with g.scope("extend"):
        shape = g.op("Shape", ids)
        hidden, own = drafting.forward(
            g.reshape(ids, -1),
            g.reshape(features, -1, backbone.hidden_size),
            _Tokens(positions, BlockTokens(shape), bias_input, [[part] for part in past], []),
        )
        for index in layers:
            for name, value in zip(delta_names(index), own[index], strict=True):
                g.output(name, value, FLOAT, "B", backbone.kv_head_count, "T", backbone.head_dim)
        per_request = g.op("Reshape", hidden, g.op("Concat", shape, g.ints(backbone.hidden_size), axis=0))
        hidden = g.op("GatherND", per_request, last_index, batch_dims=1)
        position = unsqueeze(g, g.op("GatherND", positions, last_index, batch_dims=1), 1)
        row = unsqueeze(g, g.op("GatherND", g.op("Squeeze", bias_input, g.ints(1)), last_index, batch_dims=1), 1, 2)

    sampler = DraftSampler(g, drafter, length)
    with g.scope("step.0"):
        logits, feature = drafting.predict(hidden)
        logits_steps = [logits]
        token = sampler.draw(0, logits)
    parts = [[cached, extended] for cached, extended in zip(past, own, strict=True)]
    between = [positions]
    for step in range(1, length):
        with g.scope(f"step.{step}"):
            position = g.op("Add", position, g.ints(1))
            row = g.op("Pad", row, g.ints(0, 0, 0, 0, 0, 0, 0, 1))
            tokens = _Tokens(position, BlockTokens(g.ints(-1, 1)), row, parts, between)
            hidden, own = drafting.forward(g.reshape(token, -1), feature, tokens)
            parts = [[*before, rows] for before, rows in zip(parts, own, strict=True)]
            between = [*between, position]
            logits, feature = drafting.predict(hidden)
            logits_steps.append(logits)
            token = sampler.draw(step, logits)
    sampler.output_tokens()
    g.output(
        "draft_logits",
        g.op("Concat", *logits_steps, axis=1),
        FLOAT,
        "B",
        length,
        drafter.vocabulary_size,
    )
    return g.model()


@dataclass(frozen=True)
class _Tokens:
    """Tokens of one pass and what they may see.

    Attributes:
        positions: int64 ``[B, T]``.
        layout: How they are regrouped.
        bias: ``[B, 1, T, K]``, causal.
        parts: Keys and values before them, the cached ones first; a list a layer.
        between: Positions ``[B, K_i]`` of the parts between the cached keys and the tokens' own.
    """

    positions: ir.Value
    layout: BlockTokens
    bias: ir.Value
    parts: list[list[KeyValue]]
    between: list[ir.Value]


class _Drafting:
    """The drafter's layers, applied first to committed tokens and then to one drafted token after another."""

    def __init__(self, g: GraphBuilder, drafter: Drafter, tensors: Mapping[str, LazyTensor]) -> None:
        self._g = g
        self._drafter = drafter
        self._backbone = drafter.backbone
        self._tensors = tensors

    def forward(self, ids: ir.Value, features: ir.Value, tokens: _Tokens) -> tuple[ir.Value, list[KeyValue]]:
        """One pass over N tokens.

        Args:
            ids: int64 ``[N]``: the token after each feature.
            features: ``[N, H]``: the target's features, or what the step before predicted with.
            tokens: Where the tokens stand and what they see.

        Returns:
            Pre-norm hidden states ``[N, H]``, and each layer's keys and values ``[B, Hkv, T, D]`` of the tokens.
        """
        g, backbone = self._g, self._backbone
        rotary = rotation(g, backbone, g.reshape(tokens.positions, -1), tokens.layout)
        keys = [key for key, _ in tokens.parts[0]]
        count = g.op("Shape", tokens.positions, start=1, end=2)
        sizes = g.op("Concat", part_sizes(g, *keys), count, axis=0)
        bias = AttentionBias(
            g,
            tokens.bias,
            lambda: distances(g, tokens.positions, keys[0], *tokens.between, tokens.positions),
            backbone.head_count // backbone.kv_head_count,
            hides_future=True,
        )
        first = bias.of(backbone.layers[0])
        x, own = self._first_layer(ids, features, rotary, tokens, first, sizes)
        rows = [own]
        for index in range(1, len(backbone.layers)):
            x, own = decoder_layer(
                g,
                x,
                self._tensors,
                index,
                backbone,
                rotary,
                tokens.layout,
                after(*tokens.parts[index]),
                bias.of(backbone.layers[index]),
                sizes,
            )
            rows.append(own)
        return x, rows

    def _first_layer(
        self, ids: ir.Value, features: ir.Value, rotary: Rotation, tokens: _Tokens, bias: ir.Value, sizes: ir.Value
    ) -> tuple[ir.Value, KeyValue]:
        """The layer that reads token and feature side by side, ``[N, 2H]``."""
        g, tensors, epsilon = self._g, self._tensors, self._backbone.norm_epsilon
        with g.scope("layers.0"):
            token = rms_norm(g, embed(g, ids, tensors, "embed_tokens"), tensors, "layers.0.input_layernorm", epsilon)
            normed = rms_norm(g, features, tensors, "layers.0.hidden_norm", epsilon)
            pair = g.op("Concat", token, normed, axis=-1)
            mixed, own = attention(
                g,
                pair,
                tensors,
                "layers.0.self_attn",
                self._backbone,
                rotary,
                tokens.layout,
                after(*tokens.parts[0]),
                bias,
                sizes,
            )
            residual = normed if self._drafter.norm_before_residual else features
            return feed_forward(g, g.op("Add", residual, mixed), tensors, "layers.0", self._backbone), own

    def predict(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Draft logits ``[B, 1, V']`` of pre-norm hidden states ``[B, H]``, and the next step's features ``[B, H]``."""
        g = self._g
        normed = rms_norm(g, hidden, self._tensors, "norm", self._backbone.norm_epsilon)
        logits = unsqueeze(g, linear(g, normed, self._tensors, "lm_head"), 1)
        return logits, normed if self._drafter.norm_output else hidden
