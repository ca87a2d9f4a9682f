"""The block drafter's graph (DSpark and DFlash): one parallel pass over the anchor and mask tokens."""

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.graphs.builder import FLOAT, INT64, GraphBuilder
from dspark.exporter.graphs.encodings import Encodings
from dspark.exporter.graphs.layers import (
    AttentionBias,
    BlockTokens,
    after,
    cached_rows,
    decoder_layer,
    distances,
    embed,
    linear,
    part_sizes,
    rms_norm,
    rotation,
    unsqueeze,
)
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.contract import CANDIDATES, context_names

__all__ = ["build_block_drafter"]


def build_block_drafter(drafter: Drafter, target: Target, weights: WeightFile, encodings: Encodings) -> ir.Model:
    """Builds the drafter's graph (inputs and outputs in ARCHITECTURE.md, "The graphs").

    Args:
        drafter: A DSpark or DFlash drafter.
        target: Lends its embedding and LM head where the drafter has none.
        weights: Receives the weights.
        encodings: How they are stored and multiplied with.
    """
    g = GraphBuilder("drafter", weights, encodings)
    backbone, size = drafter.backbone, drafter.block_size
    tensors = {**target.tables, **drafter.tensors}
    anchor_ids = g.input("anchor_ids", INT64, "B")
    anchor_positions = g.input("anchor_positions", INT64, "B")
    bias_input = g.input("context_bias", FLOAT, "B", 1, 1, 1, "S")
    context = [cached_rows(g, context_names(index), backbone) for index in range(len(backbone.layers))]

    positions = g.op("Add", unsqueeze(g, anchor_positions, 1), g.constant(np.arange(size, dtype=np.int64)[None]))
    sizes = g.op("Concat", part_sizes(g, context[0][0]), g.ints(size), axis=0)
    layout = BlockTokens(g.ints(-1, size))
    rotary = rotation(g, backbone, g.reshape(positions, -1), layout)
    bias = AttentionBias(
        g,
        g.op("Pad", g.op("Squeeze", bias_input, g.ints(1)), g.ints(0, 0, 0, 0, 0, 0, 0, size)),
        lambda: distances(g, positions, context[0][0], positions),
        backbone.head_count // backbone.kv_head_count,
        hides_future=False,
    )
    assert drafter.mask_token_id is not None, "a block drafter fills its slots with a mask token"
    anchors = unsqueeze(g, anchor_ids, 1)
    masks = g.constant(np.full((1, size - 1), drafter.mask_token_id))
    # Padding with the mask's id would be shorter, but QNN pads with float constants only.
    ids = g.op("Concat", anchors, g.op("Add", g.op("Sub", anchors, anchors), masks), axis=1) if size > 1 else anchors
    x = embed(g, g.reshape(ids, -1), tensors, "embed_tokens")
    for index, layer in enumerate(backbone.layers):
        seen = after(context[index])
        x, _ = decoder_layer(g, x, tensors, index, backbone, rotary, layout, seen, bias.of(layer), sizes)

    with g.scope("lm_head"):
        if not drafter.anchor_predicts:
            slots = g.reshape(x, -1, size, backbone.hidden_size)
            x = g.reshape(g.op("Slice", slots, g.ints(1), g.ints(size), g.ints(1)), -1, backbone.hidden_size)
        x = rms_norm(g, x, tensors, "norm", backbone.norm_epsilon)
        logits = linear(g, x, tensors, "lm_head")
        if drafter.top_k is not None:
            logits, candidates = g.top_k(logits, drafter.top_k)
            shape = (drafter.draft_length, drafter.top_k)
            g.output(CANDIDATES, g.reshape(candidates, -1, *shape), INT64, "B", *shape)
        logits = g.reshape(logits, -1, drafter.draft_length, drafter.choices)
        hidden = g.reshape(x, -1, drafter.draft_length, backbone.hidden_size)
    g.output("hidden", hidden, FLOAT, "B", drafter.draft_length, backbone.hidden_size)
    g.output("base_logits", logits, FLOAT, "B", drafter.draft_length, drafter.choices)
    return g.model()
