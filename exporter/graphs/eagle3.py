"""The EAGLE-3 drafter's graph: extends its cache with committed tokens, then drafts token by token.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
arXiv:2503.01840.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.draft_sampler import DraftSampler
from dspark.exporter.graphs.encodings import Encodings
from dspark.exporter.graphs.facts import drafter_facts
from dspark.exporter.graphs.layers import (
    AttentionBias,
    BlockTokens,
    ForwardPass,
    KeyValue,
    Model,
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
)
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.contract import context_names, delta_names
from dspark.runtime.bundle.graph_specs import eagle3_drafter_spec

__all__ = ["build_eagle3_drafter"]


def build_eagle3_drafter(drafter: Drafter, target: Target, weights: WeightFile, encodings: Encodings) -> ir.Model:
    """Builds the drafter's graph.

    B requests, T the most committed tokens of a request, S the cache's capacity, γ draft tokens of K choices each.

    | input | type and shape | content |
    |---|---|---|
    | `input_ids` | int64 `[B, T]` | the token after each feature |
    | `features` | float32 `[B, T, H′]` | the target's features of committed tokens |
    | `position_ids` | int64 `[B, T]` | their positions |
    | `last_index` | int64 `[B]` | index of each request's last one; what follows is padding |
    | `attention_bias` | float32 `[B, 1, 1, T, S+T]` | 0 for keys that are seen, else `MASKED` |
    | `context.{j}.{key,value}` | float32 `[B, Hkv′, S, D′]` | the cache of draft layer j |
    | `uniform` | float32 `[B, γ]` | random numbers from 0 to 1 |
    | `temperature` | float32 `[B]` | 0 takes the likeliest tokens |

    | output | type and shape | content |
    |---|---|---|
    | `new.{j}.{key,value}` | float32 `[B, Hkv′, T, D′]` | rows of the committed tokens |
    | `tokens` | int64 `[B, γ]` | drawn tokens, target ids |
    | `draft_logits` | float32 `[B, γ, K]` | logits that they were drawn from |

    Args:
        drafter: An EAGLE-3 drafter.
        target: Lends its embedding and LM head where the drafter has none.
        weights: Receives the weights.
        encodings: How they are stored and multiplied with.
    """
    g = GraphBuilder(eagle3_drafter_spec(drafter_facts(drafter)), weights)
    backbone = drafter.backbone
    layers = range(len(backbone.layers))
    ids, positions = g.input("input_ids"), g.input("position_ids")
    last_index = g.unsqueeze(g.input("last_index"), 1)
    bias_input = g.op("Squeeze", g.input("attention_bias"), g.ints(1))
    past = [cached_rows(g, context_names(layer)) for layer in layers]
    drafting = _Drafting(Model(g, backbone, {**target.tables, **drafter.tensors}, encodings), drafter)

    with g.scope("extend"):
        shape = g.op("Shape", ids)
        ids, features = g.reshape(ids, -1), g.reshape(g.input("features"), -1, backbone.hidden_size)
        hidden, own = drafting.forward(ids, features, _Tokens(positions, BlockTokens(shape), bias_input, [past], []))
        for layer in layers:
            for name, value in zip(delta_names(layer), own[layer], strict=True):
                g.output(name, value)
        per_request = g.op("Reshape", hidden, g.op("Concat", shape, g.ints(backbone.hidden_size), axis=0))
        hidden = g.op("GatherND", per_request, last_index, batch_dims=1)
        position = g.unsqueeze(g.op("GatherND", positions, last_index, batch_dims=1), 1)
        row = g.unsqueeze(g.op("GatherND", g.op("Squeeze", bias_input, g.ints(1)), last_index, batch_dims=1), 1, 2)

    sampler = DraftSampler(g, drafter)
    with g.scope("step.0"):
        logits, feature = drafting.predict(hidden)
        token = sampler.draw(0, logits)
    parts, between = [past, own], [positions]
    for step in range(1, drafter.draft_length):
        with g.scope(f"step.{step}"):
            position = g.op("Add", position, g.ints(1))
            row = g.op("Pad", row, g.ints(0, 0, 0, 0, 0, 0, 0, 1))
            tokens = _Tokens(position, BlockTokens(g.ints(-1, 1)), row, parts, between)
            hidden, own = drafting.forward(g.reshape(token, -1), feature, tokens)
            parts, between = [*parts, own], [*between, position]
            logits, feature = drafting.predict(hidden)
            token = sampler.draw(step, logits)
    sampler.output()
    return g.model()


@dataclass(frozen=True)
class _Tokens:
    """Tokens of one pass and what they may see.

    Attributes:
        positions: int64 ``[B, T]``.
        layout: How they are regrouped.
        bias: ``[B, 1, T, K]``, causal.
        parts: Keys and values before them, the cached ones first; each part has those of all layers.
        between: Positions ``[B, K_i]`` of the parts between the cached keys and the tokens' own.
    """

    positions: ir.Value
    layout: BlockTokens
    bias: ir.Value
    parts: Sequence[Sequence[KeyValue]]
    between: Sequence[ir.Value]


class _Drafting:
    """The drafter's layers, applied first to committed tokens and then to one drafted token after another."""

    def __init__(self, model: Model, drafter: Drafter) -> None:
        self._model = model
        self._drafter = drafter

    def forward(self, ids: ir.Value, features: ir.Value, tokens: _Tokens) -> tuple[ir.Value, list[KeyValue]]:
        """One pass over N tokens.

        Args:
            ids: int64 ``[N]``: the token after each feature.
            features: ``[N, H]``: the target's features, or what the step before predicted with.
            tokens: Where the tokens stand and what they see.

        Returns:
            Pre-norm hidden states ``[N, H]``, and each layer's keys and values ``[B, Hkv, T, D]`` of the tokens.
        """
        model, g = self._model, self._model.g
        rotary = rotation(g, model.backbone.rope, g.reshape(tokens.positions, -1), tokens.layout)
        keys = [key for (key, _), *_ in tokens.parts]
        count = g.op("Shape", tokens.positions, start=1, end=2)
        sizes = g.op("Concat", part_sizes(g, *keys), count, axis=0)
        bias = AttentionBias(
            model,
            tokens.bias,
            lambda: distances(g, tokens.positions, keys[0], *tokens.between, tokens.positions),
            hides_future=True,
        )
        forward = ForwardPass(model, rotary, tokens.layout, bias, after(*tokens.parts), sizes)
        x, own = self._first_layer(forward, ids, features)
        rows = [own]
        for layer in range(1, len(model.backbone.layers)):
            x, own = decoder_layer(forward, x, layer)
            rows.append(own)
        return x, rows

    def _first_layer(self, forward: ForwardPass, ids: ir.Value, features: ir.Value) -> tuple[ir.Value, KeyValue]:
        """The layer that reads token and feature side by side, ``[N, 2H]``."""
        model, g = self._model, self._model.g
        bias = forward.bias.of(model.backbone.layers[0])
        with g.scope("layers.0"):
            token = rms_norm(model, embed(model, ids), "layers.0.input_layernorm")
            normed = rms_norm(model, features, "layers.0.hidden_norm")
            mixed, own = attention(forward, g.op("Concat", token, normed, axis=-1), 0, bias)
            residual = normed if self._drafter.norm_before_residual else features
            return feed_forward(model, g.op("Add", residual, mixed), 0), own

    def predict(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Draft logits ``[B, 1, V′]`` of pre-norm hidden states ``[B, H]``, and the next step's features ``[B, H]``."""
        g = self._model.g
        normed = rms_norm(self._model, hidden, "norm")
        logits = g.unsqueeze(linear(self._model, normed, "lm_head"), 1)
        return logits, normed if self._drafter.norm_output else hidden
