"""Self-attention over what is cached and over the tokens themselves."""

from collections.abc import Sequence
from functools import reduce

import onnx_ir as ir

from dspark.exporter.graphs.layers.forward_pass import ForwardPass
from dspark.exporter.graphs.layers.heads import heads
from dspark.exporter.graphs.layers.key_values import KeyValue
from dspark.exporter.graphs.layers.linear import linear
from dspark.exporter.graphs.layers.model import Model

__all__ = ["attend", "attention"]


def attention(forward: ForwardPass, x: ir.Value, layer: int, bias: ir.Value) -> tuple[ir.Value, KeyValue]:
    """Self-attention of one layer.

    Args:
        forward: The pass.
        x: Attention input ``[N, in]``.
        layer: The layer's index.
        bias: As in ``attend``.

    Returns:
        The attention's output ``[N, H]`` and the tokens' own keys and values.
    """
    model, g, prefix = forward.model, forward.model.g, f"layers.{layer}.self_attn"
    query, key, value = heads(model, x, prefix, "qkv", forward.rotation, forward.layout)
    own = key, value
    mixed = attend(model, query, forward.extend(layer, own), bias, forward.sizes)
    rows = forward.layout.flatten(g, mixed, model.backbone.head_count * model.backbone.head_dim)
    with g.scope("o_proj"):
        return linear(model, rows, f"{prefix}.o_proj"), own


def attend(
    model: Model, query: ir.Value, parts: Sequence[KeyValue], bias: ir.Value, sizes: ir.Value | None
) -> ir.Value:
    """Attention over keys that lie in several places: one softmax over all, and none of them is copied.

    Args:
        model: For its head counts.
        query: ``[B, Hq, T, D]``.
        parts: Keys and values ``[B, Hkv, K_i, D]``.
        bias: ``[B, 1, G · T or 1, ΣK_i]``.
        sizes: int64 ``[parts]``: the K_i; None if there is but one.

    Returns:
        ``[B, Hq, T, D]``.
    """
    g, backbone = model.g, model.backbone
    query = g.reshape(query, 0, backbone.kv_head_count, -1, backbone.head_dim)
    query = g.op("Mul", query, g.floats(backbone.head_dim**-0.5))  # just before the product, which can take it in
    scores = [g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2])) for key, _ in parts]
    joined = scores[0] if sizes is None else g.op("Concat", *scores, axis=-1)
    weights = g.op("Softmax", g.op("Add", joined, bias), axis=-1)
    per_part = [weights] if sizes is None else g.split(weights, sizes, count=len(parts))
    mixed = [g.op("MatMul", part, value) for part, (_, value) in zip(per_part, parts, strict=True)]
    return g.reshape(reduce(lambda a, b: g.op("Add", a, b), mixed), 0, backbone.head_count, -1, backbone.head_dim)
