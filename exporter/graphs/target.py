"""The target's graph: verifies flat tokens and computes the drafter's context next to its own cache rows."""

import onnx_ir as ir

from dspark.exporter.checkpoints.description import Drafter, DrafterKind, Target
from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.encodings import Encodings
from dspark.exporter.graphs.facts import drafter_facts, target_facts
from dspark.exporter.graphs.layers import (
    AttentionBias,
    ForwardPass,
    Model,
    RaggedTokens,
    decoder_layer,
    embed,
    heads,
    linear,
    rms_norm,
    rotation,
)
from dspark.exporter.graphs.target_cache import CACHES, TargetCache
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.contract import CHOICES, FEATURE, LOGIT_SUMS
from dspark.runtime.bundle.graph_specs import target_spec
from dspark.runtime.bundle.manifest import CacheForm

__all__ = ["build_target"]


def build_target(
    target: Target, drafter: Drafter | None, weights: WeightFile, encodings: Encodings, cache_form: CacheForm
) -> ir.Model:
    """Builds the target's graph.

    B requests, N flat tokens, T the most tokens of a request, K scored tokens, S the cache's capacity.

    | input | type and shape | content |
    |---|---|---|
    | `input_ids` | int64 `[N]` | tokens of all requests, one after the other |
    | `position_ids` | int64 `[N]` | their positions |
    | `pad_index` | int64 `[B, T]` | flat index of each request's token t; padding repeats any |
    | `unpad_index` | int64 `[N]` | place of each flat token among B · T |
    | `logits_index` | int64 `[K]` | flat tokens that get logits |
    | `rope_lengths` | int64 `[N]` | text length that RoPE sees; with dynamic NTK scaling only |
    | `past.{l}.{key,value}` | float32 `[B, Hkv, S, D]` | the cache of layer l |
    | `write_index` | int64 `[B]` | row of each request's first new token; in-place only |
    | `attention_bias` | float32 `[B, 1, 1, T, S]` | 0 for keys that are seen, else `MASKED`; `[…, S+T]` for delta |
    | `context.{j}.{key,value}` | float32 `[B, Hkv′, S, D′]` | the cache of draft layer j; in-place only |

    | output | type and shape | content |
    |---|---|---|
    | `present.{l}.{key,value}` | float32 `[B, Hkv, S, D]` | the cache with new rows; in-place only |
    | `new.{l}.{key,value}` | float32 `[B, Hkv, T, D]` | new rows; delta only |
    | `logits` | float32 `[K, V]` | scores of the token after each scored one |
    | `choices` | int64 `[K]` | their argmax; in-place only |
    | `logit_sums` | float32 `[K]` | their sums, finite if all are; in-place only |
    | `present.context.{j}.{key,value}` | float32 `[B, Hkv′, S, D′]` | context with new rows; in-place only |
    | `context.{j}.{key,value}` | float32 `[B, Hkv′, T, D′]` | new context rows; delta only |
    | `feature` | float32 `[N, H′]` | what an EAGLE-3 drafter reads, instead of context |

    Args:
        target: The target model.
        drafter: The drafter whose context rows or features the graph computes, if there is one.
        weights: Receives the weights.
        encodings: How they are stored and multiplied with.
        cache_form: How it keeps keys and values.
    """
    spec = target_spec(target_facts(target, cache_form), None if drafter is None else drafter_facts(drafter))
    g = GraphBuilder(spec, weights)
    backbone = target.backbone
    model = Model(g, backbone, {**target.tensors, **target.tables}, encodings)
    positions, pad_index = g.input("position_ids"), g.input("pad_index")
    layout = RaggedTokens(pad_index, g.input("unpad_index"))
    lengths = g.input("rope_lengths") if backbone.rope.dynamic else None
    cache = CACHES[cache_form](g, len(backbone.layers))

    rotary = rotation(g, backbone.rope, positions, layout, lengths)
    bias = AttentionBias(
        model,
        g.op("Squeeze", g.input("attention_bias"), g.ints(1)),
        lambda: cache.distances(g.op("Gather", positions, pad_index, axis=0)),
        hides_future=True,
    )
    forward = ForwardPass(model, rotary, layout, bias, cache.extend, cache.sizes)
    x = embed(model, g.input("input_ids"))
    taps = {-1: x}
    for layer in range(len(backbone.layers)):
        x, _ = decoder_layer(forward, x, layer)
        taps[layer] = x

    with g.scope("lm_head"):
        scored = rms_norm(model, g.op("Gather", x, g.input("logits_index"), axis=0), "norm")
        logits = linear(model, scored, "lm_head")
        g.output("logits", logits)
        if cache_form == "in-place":  # devices that need the other form may not take ArgMax
            g.output(CHOICES, g.op("ArgMax", logits, axis=-1, keepdims=0))
            g.output(LOGIT_SUMS, g.op("ReduceSum", logits, g.ints(-1), keepdims=0))
    if drafter is not None:
        tensors = {f"drafter.{name}": tensor for name, tensor in drafter.tensors.items()}
        reader = Model(g, drafter.backbone, tensors, encodings)
        _drafter_context(reader, drafter, [taps[tap] for tap in drafter.taps], positions, layout, cache)
    return g.model()


def _drafter_context(
    model: Model,
    drafter: Drafter,
    taps: list[ir.Value],
    positions: ir.Value,
    layout: RaggedTokens,
    cache: TargetCache,
) -> None:
    """Turns taps into what the drafter reads: context keys and values of each draft layer, or EAGLE-3's feature."""
    g = model.g
    with g.scope("drafter"):
        if drafter.fc_norm:
            taps = [rms_norm(model, tap, f"drafter.fc_norm.{index}") for index, tap in enumerate(taps)]
        features = g.op("Concat", *taps, axis=-1)
        if drafter.norm_before_fc:
            features = rms_norm(model, features, "drafter.input_norm")
        features = linear(model, features, "drafter.fc")
        if drafter.kind is DrafterKind.EAGLE3:
            g.output(FEATURE, features)
            return
        features = rms_norm(model, features, "drafter.hidden_norm")
        rotary = rotation(g, model.backbone.rope, positions, layout)
        for layer in range(len(model.backbone.layers)):
            with g.scope(f"layers.{layer}"):
                prefix = f"drafter.layers.{layer}.self_attn"
                key, value = heads(model, features, prefix, "kv", rotary, layout)
                cache.keep_context(layer, (key, value))
