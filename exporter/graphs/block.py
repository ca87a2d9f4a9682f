"""The block drafter's graph (DSpark and DFlash): one parallel pass over the anchor and mask tokens."""

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.encodings import Encodings
from dspark.exporter.graphs.facts import drafter_facts
from dspark.exporter.graphs.layers import (
    AttentionBias,
    BlockTokens,
    ForwardPass,
    Model,
    after,
    cached_rows,
    decoder_layer,
    distances,
    embed,
    linear,
    part_sizes,
    rms_norm,
    rotation,
)
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.contract import CANDIDATES, context_names
from dspark.runtime.bundle.graph_specs import block_drafter_spec

__all__ = ["build_block_drafter"]


def build_block_drafter(drafter: Drafter, target: Target, weights: WeightFile, encodings: Encodings) -> ir.Model:
    """Builds the drafter's graph.

    B requests, S the cache's capacity, γ draft tokens of K choices each.

    | input | type and shape | content |
    |---|---|---|
    | `anchor_ids` | int64 `[B]` | last token of each request |
    | `anchor_positions` | int64 `[B]` | its position |
    | `context_bias` | float32 `[B, 1, 1, 1, S]` | 0 for context rows that are seen, else `MASKED` |
    | `context.{j}.{key,value}` | float32 `[B, Hkv′, S, D′]` | context of draft layer j, from the target |

    | output | type and shape | content |
    |---|---|---|
    | `hidden` | float32 `[B, γ, H′]` | normed hidden states |
    | `base_logits` | float32 `[B, γ, K]` | logits before the head's repair |
    | `candidates` | int64 `[B, γ, K]` | their draft ids; with a top-k only |

    Args:
        drafter: A DSpark or DFlash drafter.
        target: Lends its embedding and LM head where the drafter has none.
        weights: Receives the weights.
        encodings: How they are stored and multiplied with.
    """
    g = GraphBuilder(block_drafter_spec(drafter_facts(drafter)), weights)
    backbone, size = drafter.backbone, drafter.block_size
    model = Model(g, backbone, {**target.tables, **drafter.tensors}, encodings)
    context = [cached_rows(g, context_names(layer)) for layer in range(len(backbone.layers))]
    first_keys, _ = context[0]

    anchor_positions = g.unsqueeze(g.input("anchor_positions"), 1)
    positions = g.op("Add", anchor_positions, g.constant(np.arange(size, dtype=np.int64)[None]))
    sizes = g.op("Concat", part_sizes(g, first_keys), g.ints(size), axis=0)
    layout = BlockTokens(g.ints(-1, size))
    rotary = rotation(g, backbone.rope, g.reshape(positions, -1), layout)
    seen_context = g.op("Squeeze", g.input("context_bias"), g.ints(1))
    bias = AttentionBias(
        model,
        g.op("Pad", seen_context, g.ints(0, 0, 0, 0, 0, 0, 0, size)),
        lambda: distances(g, positions, first_keys, positions),
        hides_future=False,
    )
    forward = ForwardPass(model, rotary, layout, bias, after(context), sizes)
    x = embed(model, g.reshape(_block_ids(g, drafter), -1))
    for layer in range(len(backbone.layers)):
        x, _ = decoder_layer(forward, x, layer)

    with g.scope("lm_head"):
        if not drafter.anchor_predicts:
            slots = g.reshape(x, -1, size, backbone.hidden_size)
            x = g.reshape(g.op("Slice", slots, g.ints(1), g.ints(size), g.ints(1)), -1, backbone.hidden_size)
        x = rms_norm(model, x, "norm")
        logits = linear(model, x, "lm_head")
        if drafter.top_k is not None:
            logits, candidates = g.top_k(logits, drafter.top_k)
            g.output(CANDIDATES, g.reshape(candidates, -1, drafter.draft_length, drafter.top_k))
        logits = g.reshape(logits, -1, drafter.draft_length, drafter.choices)
        g.output("hidden", g.reshape(x, -1, drafter.draft_length, backbone.hidden_size))
    g.output("base_logits", logits)
    return g.model()


def _block_ids(g: GraphBuilder, drafter: Drafter) -> ir.Value:
    """The anchor and masks, int64 ``[B, block size]``."""
    assert drafter.mask_token_id is not None, "a block drafter fills its slots with a mask token"
    anchors = g.unsqueeze(g.input("anchor_ids"), 1)
    masks = g.constant(np.full((1, drafter.block_size - 1), drafter.mask_token_id))
    if drafter.block_size == 1:
        return anchors
    # Padding with the mask's id would be shorter, but QNN pads with float constants only.
    return g.op("Concat", anchors, g.op("Add", g.op("Sub", anchors, anchors), masks), axis=1)
