"""The target's graph: verifies flat tokens and computes the drafter's context next to its own cache rows."""

from functools import partial

import onnx_ir as ir

from dspark.exporter.checkpoints.description import Drafter, DrafterKind, Target
from dspark.exporter.graphs.builder import FLOAT, INT64, GraphBuilder
from dspark.exporter.graphs.encodings import Encodings
from dspark.exporter.graphs.layers import (
    AttentionBias,
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
from dspark.runtime.bundle.manifest import CacheForm

__all__ = ["build_target"]


def build_target(
    target: Target, drafter: Drafter | None, weights: WeightFile, encodings: Encodings, cache_form: CacheForm
) -> ir.Model:
    """Builds the target's graph (inputs and outputs in ARCHITECTURE.md, "The graphs").

    Args:
        target: The target model.
        drafter: The drafter whose context rows or features the graph computes, if there is one.
        weights: Receives the weights.
        encodings: How they are stored and multiplied with.
        cache_form: How it keeps keys and values.
    """
    g = GraphBuilder("target", weights, encodings)
    backbone, tensors = target.backbone, target.tensors
    ids = g.input("input_ids", INT64, "N")
    positions = g.input("position_ids", INT64, "N")
    pad_index = g.input("pad_index", INT64, "B", "T")
    layout = RaggedTokens(pad_index, g.input("unpad_index", INT64, "N"))
    logits_index = g.input("logits_index", INT64, "K")
    lengths = g.input("rope_lengths", INT64, "N") if backbone.rope.dynamic else None
    cache = CACHES[cache_form](g, backbone, pad_index)
    bias_input = g.input("attention_bias", FLOAT, "B", 1, 1, "T", cache.keys)

    def distance() -> ir.Value:
        return cache.distances(g.op("Gather", positions, pad_index, axis=0))

    rotary = rotation(g, backbone, positions, layout, lengths)
    bias = AttentionBias(
        g,
        g.op("Squeeze", bias_input, g.ints(1)),
        distance,
        backbone.head_count // backbone.kv_head_count,
        hides_future=True,
    )
    x = embed(g, ids, tensors, "embed_tokens")
    taps = {-1: x}
    for index, layer in enumerate(backbone.layers):
        extend = partial(cache.extend, index)
        x, _ = decoder_layer(g, x, tensors, index, backbone, rotary, layout, extend, bias.of(layer), cache.sizes)
        taps[index] = x

    with g.scope("lm_head"):
        scored = rms_norm(g, g.op("Gather", x, logits_index, axis=0), tensors, "norm", backbone.norm_epsilon)
        logits = linear(g, scored, target.tables, "lm_head")
        g.output("logits", logits, FLOAT, "K", target.vocabulary_size)
        if cache_form == "in-place":  # devices that need the other form may not take ArgMax
            g.output(CHOICES, g.op("ArgMax", logits, axis=-1, keepdims=0), INT64, "K")
            g.output(LOGIT_SUMS, g.op("ReduceSum", logits, g.ints(-1), keepdims=0), FLOAT, "K")
    if drafter is not None:
        _drafter_context(g, drafter, [taps[tap] for tap in drafter.taps], positions, layout, cache)
    return g.model()


def _drafter_context(
    g: GraphBuilder,
    drafter: Drafter,
    taps: list[ir.Value],
    positions: ir.Value,
    layout: RaggedTokens,
    cache: TargetCache,
) -> None:
    """Turns taps into what the drafter reads: context keys and values a draft layer, or EAGLE-3's feature."""
    backbone = drafter.backbone
    tensors = {f"drafter.{name}": tensor for name, tensor in drafter.tensors.items()}
    with g.scope("drafter"):
        if drafter.fc_norm:
            taps = [
                rms_norm(g, tap, tensors, f"drafter.fc_norm.{index}", backbone.norm_epsilon)
                for index, tap in enumerate(taps)
            ]
        features = g.op("Concat", *taps, axis=-1)
        if drafter.norm_before_fc:
            features = rms_norm(g, features, tensors, "drafter.input_norm", backbone.norm_epsilon)
        features = linear(g, features, tensors, "drafter.fc")
        if drafter.kind is DrafterKind.EAGLE3:
            g.output(FEATURE, features, FLOAT, "N", backbone.hidden_size)
            return
        features = rms_norm(g, features, tensors, "drafter.hidden_norm", backbone.norm_epsilon)
        rotary = rotation(g, backbone, positions, layout)
        for index in range(len(backbone.layers)):
            with g.scope(f"layers.{index}"):
                prefix = f"drafter.layers.{index}.self_attn"
                key, value = heads(g, features, tensors, prefix, "kv", backbone, rotary, layout)
                cache.keep_context(index, backbone, (key, value))
