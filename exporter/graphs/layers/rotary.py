"""Rotary positions, computed in the graph from the tokens' positions."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.description import Rope
from dspark.exporter.graphs.builder import FLOAT, GraphBuilder
from dspark.exporter.graphs.layers.token_layout import TokenLayout

__all__ = ["Rotation", "rotation"]


@dataclass(frozen=True)
class Rotation:
    """The rotation of some tokens: tables ``[B, 1, T, rotary_dim]`` for a head and for its swapped halves."""

    cos: ir.Value
    sin: ir.Value
    rotary_dim: int

    def apply(self, g: GraphBuilder, x: ir.Value, head_dim: int) -> ir.Value:
        """Rotates ``x [B, heads, T, D]`` in half-split pairs; dimensions past ``rotary_dim`` pass through."""
        turned, *rest = [x]
        if self.rotary_dim < head_dim:
            turned, *rest = g.split(x, [self.rotary_dim, head_dim - self.rotary_dim])
        swapped = g.op("Concat", *reversed(g.split(turned, [self.rotary_dim // 2] * 2)), axis=-1)
        turned = g.op("Add", g.op("Mul", turned, self.cos), g.op("Mul", swapped, self.sin))
        return g.op("Concat", turned, *rest, axis=-1) if rest else turned


def rotation(
    g: GraphBuilder, rope: Rope, positions: ir.Value, layout: TokenLayout, lengths: ir.Value | None = None
) -> Rotation:
    """Computes the rotation of tokens in the graph, so that no table can be too short for the text.

    Args:
        g: The graph.
        rope: Frequencies and scaling.
        positions: int64 ``[N]``.
        layout: How tokens are regrouped.
        lengths: int64 ``[N]``: the text's length that dynamic NTK scaling sees at each token; by default the token's
            own position + 1. Ignored by the other types.
    """
    with g.scope("rope"):
        frequencies = g.constant(np.asarray(rope.inverse_frequencies, np.float32)[None])
        if rope.dynamic is not None:
            frequencies = _dynamic_frequencies(g, rope, lengths or g.op("Add", positions, g.ints(1)))
        angles = g.op("Mul", g.unsqueeze(g.op("Cast", positions, to=FLOAT), 1), frequencies)
        cos, sin = g.op("Cos", angles), g.op("Sin", angles)
        if rope.magnitude != 1.0:
            cos, sin = (g.op("Mul", table, g.floats(rope.magnitude)) for table in (cos, sin))
        tables = g.op("Concat", cos, cos, axis=-1), g.op("Concat", g.op("Neg", sin), sin, axis=-1)
        cos, sin = (layout.group(g, g.unsqueeze(table, 1), 1, rope.rotary_dim) for table in tables)
        return Rotation(cos, sin, rope.rotary_dim)


def _dynamic_frequencies(g: GraphBuilder, rope: Rope, lengths: ir.Value) -> ir.Value:
    """Frequencies ``[N, rotary_dim / 2]`` of dynamic NTK scaling (see ``DynamicScaling``)."""
    scaling = rope.dynamic
    assert scaling is not None
    dim = rope.rotary_dim
    length = g.op("Cast", g.op("Max", lengths, g.ints(scaling.original_length)), to=FLOAT)
    growth = g.op(
        "Sub", g.op("Mul", length, g.floats(scaling.factor / scaling.original_length)), g.floats(scaling.factor - 1)
    )
    base = g.op("Mul", g.op("Pow", growth, g.floats(dim / (dim - 2))), g.floats(scaling.theta))
    exponents = g.constant(-np.arange(0, dim, 2, dtype=np.float32)[None] / dim)
    return g.op("Pow", g.unsqueeze(base, 1), exponents)
