"""The target's graph: verifies flat tokens and computes the drafter's context next to its own cache rows."""

import onnx_ir as ir

from dspark.exporter.checkpoints.description import Drafter, DrafterKind, Target
from dspark.exporter.graphs.builder import FLOAT, INT64, GraphBuilder
from dspark.exporter.graphs.encodings import Encodings
from dspark.exporter.graphs.layers import (
    AttentionBias,
    RaggedTokens,
    cached_rows,
    decoder_layer,
    distances,
    embed,
    heads,
    linear,
    part_sizes,
    rms_norm,
    rotation,
)
from dspark.exporter.weights import WeightFile
from dspark.runtime.contract import FEATURE, cache_names, context_names, delta_names

__all__ = ["build_target"]


def build_target(target: Target, drafter: Drafter | None, weights: WeightFile, encodings: Encodings) -> ir.Model:
    """Builds the target's graph (inputs and outputs in ARCHITECTURE.md, "The graphs").

    Args:
        target: The target model.
        drafter: The drafter whose context rows or features the graph computes, if there is one.
        weights: Receives the weights.
        encodings: How they are stored and multiplied with.
    """
    g = GraphBuilder("target", weights, encodings)
    backbone, tensors = target.backbone, target.tensors
    ids = g.input("input_ids", INT64, "N")
    positions = g.input("position_ids", INT64, "N")
    pad_index = g.input("pad_index", INT64, "B", "T")
    layout = RaggedTokens(pad_index, g.input("unpad_index", INT64, "N"))
    bias_input = g.input("attention_bias", FLOAT, "B", 1, 1, "T", "S+T")
    logits_index = g.input("logits_index", INT64, "K")
    lengths = g.input("rope_lengths", INT64, "N") if backbone.rope.dynamic else None
    past = [cached_rows(g, cache_names(index), backbone) for index in range(len(backbone.layers))]

    def distance() -> ir.Value:
        queries = g.op("Gather", positions, pad_index, axis=0)
        return distances(g, queries, past[0][0], queries)

    rotary = rotation(g, backbone, positions, layout, lengths)
    sizes = g.op("Concat", part_sizes(g, past[0][0]), g.op("Shape", pad_index, start=1, end=2), axis=0)
    bias = AttentionBias(
        g,
        g.op("Squeeze", bias_input, g.ints(1)),
        distance,
        backbone.head_count // backbone.kv_head_count,
        hides_future=True,
    )
    x = embed(g, ids, tensors, "embed_tokens")
    taps = {-1: x}
    rows = []
    for index, layer in enumerate(backbone.layers):
        x, own = decoder_layer(g, x, tensors, index, backbone, rotary, layout, [past[index]], bias.of(layer), sizes)
        taps[index] = x
        rows.append(own)

    with g.scope("lm_head"):
        scored = rms_norm(g, g.op("Gather", x, logits_index, axis=0), tensors, "norm", backbone.norm_epsilon)
        g.output("logits", linear(g, scored, target.tables, "lm_head"), FLOAT, "K", target.vocabulary_size)
    for index, own in enumerate(rows):
        for name, value in zip(delta_names(index), own, strict=True):
            g.output(name, value, FLOAT, "B", backbone.kv_head_count, "T", backbone.head_dim)
    if drafter is not None:
        _drafter_context(g, drafter, [taps[tap] for tap in drafter.taps], positions, layout)
    return g.model()


def _drafter_context(
    g: GraphBuilder, drafter: Drafter, taps: list[ir.Value], positions: ir.Value, layout: RaggedTokens
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
                context = heads(g, features, tensors, prefix, "kv", backbone, rotary, layout)
            for name, value in zip(context_names(index), context, strict=True):
                g.output(name, value, FLOAT, "B", backbone.kv_head_count, "T", backbone.head_dim)
