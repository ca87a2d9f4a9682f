"""Queries, keys and values of tokens: what attention is computed from, and what the cache holds."""

from collections.abc import Sequence

import onnx_ir as ir

from dspark.exporter.graphs.layers.linear import linear
from dspark.exporter.graphs.layers.model import Model
from dspark.exporter.graphs.layers.norm import rms_norm
from dspark.exporter.graphs.layers.rotary import Rotation
from dspark.exporter.graphs.layers.token_layout import TokenLayout

__all__ = ["heads"]


def heads(
    model: Model, x: ir.Value, prefix: str, letters: str, rotation: Rotation, layout: TokenLayout
) -> list[ir.Value]:
    """Queries, keys and values: projection, regrouping, norm (where the model has one), rotation.

    Args:
        model: Whose they are.
        x: Attention input ``[N, in]``.
        prefix: The attention's name, ``layers.0.self_attn``.
        letters: What is wanted, ``qkv`` or ``kv``.
        rotation: The tokens' rotation.
        layout: How tokens are regrouped.

    Returns:
        ``[B, heads, T, D]`` of each letter.
    """
    g, backbone = model.g, model.backbone
    counts = [backbone.head_count if letter == "q" else backbone.kv_head_count for letter in letters]
    with g.scope(f"{letters}_proj"):
        names = [letters] if f"{prefix}.{letters}_proj.weight" in model.tensors else ["q", "kv"]
        parts = [linear(model, x, f"{prefix}.{name}_proj") for name in names]
        projected = g.op("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]
        rows = g.reshape(projected, -1, sum(counts), backbone.head_dim)
        whole = layout.group(g, rows, sum(counts), backbone.head_dim)
        turning, value = g.split(whole, [sum(counts[:-1]), counts[-1]], axis=1)
        if f"{prefix}.k_norm.weight" in model.tensors:
            turning = _normed(model, turning, prefix, letters[:-1], counts[:-1])
        turning = rotation.apply(g, turning, backbone.head_dim)
        turned = g.split(turning, counts[:-1], axis=1) if len(counts) > 2 else [turning]
    return [*turned, value]


def _normed(model: Model, x: ir.Value, prefix: str, letters: str, counts: Sequence[int]) -> ir.Value:
    """Queries and keys ``[B, heads, T, D]`` side by side, with the norm of each head."""
    g = model.g
    parts = g.split(x, counts, axis=1) if len(counts) > 1 else [x]
    normed = [rms_norm(model, part, f"{prefix}.{letter}_norm") for part, letter in zip(parts, letters, strict=True)]
    return g.op("Concat", *normed, axis=1) if len(normed) > 1 else normed[0]
