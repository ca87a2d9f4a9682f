"""Which keys a query sees: a bias on its scores, by the layer's window and causality."""

from collections.abc import Callable
from functools import cache, reduce

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.description import Layer
from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.layers.key_values import part_sizes
from dspark.exporter.graphs.layers.model import Model
from dspark.runtime.bundle.contract import MASKED

__all__ = ["AttentionBias", "distances"]


class AttentionBias:
    """The additive bias of every kind of layer, computed once per graph.

    Queries of a group of heads that share keys are stacked (``G · T`` rows), so the bias is repeated G times.

    Args:
        model: Whose layers they are.
        bias: ``[B, 1, T, K]`` or, the same for all queries, ``[B, 1, 1, K]``: zero or ``MASKED``.
        distance: Computes each query's position minus each key's, int64 ``[B, T, K]``; called if a layer needs it.
        hides_future: Whether ``bias`` is causal already.
    """

    def __init__(self, model: Model, bias: ir.Value, distance: Callable[[], ir.Value], *, hides_future: bool) -> None:
        self._g = model.g
        self._group_size = model.backbone.head_count // model.backbone.kv_head_count
        self._bias = bias
        self._distance = cache(distance)
        self._hides_future = hides_future
        self._layers: dict[Layer, ir.Value] = {}

    def of(self, layer: Layer) -> ir.Value:
        """``[B, 1, G · T or 1, K]`` for a layer with this window and causality."""
        if layer not in self._layers:
            with self._g.scope("bias"):
                self._layers[layer] = self._stacked(layer)
        return self._layers[layer]

    def _stacked(self, layer: Layer) -> ir.Value:
        g, hidden = self._g, self._hidden(layer)
        if not hidden and not self._hides_future:  # every query sees the same keys: one row broadcasts
            return self._bias
        bias = self._bias
        if hidden:
            mask = g.op("Where", reduce(lambda a, b: g.op("Or", a, b), hidden), g.floats(MASKED), g.floats(0.0))
            bias = g.op("Add", bias, g.unsqueeze(mask, 1))
        return bias if self._group_size == 1 else g.op("Concat", *[bias] * self._group_size, axis=2)

    def _hidden(self, layer: Layer) -> list[ir.Value]:
        """Boolean ``[B, T, K]`` conditions, any of which hides a key from a query."""
        g, conditions = self._g, []
        if layer.window is not None:
            conditions.append(g.op("GreaterOrEqual", self._distance(), g.ints(layer.window)))
            if not layer.causal:
                conditions.append(g.op("LessOrEqual", self._distance(), g.ints(-layer.window)))
        if layer.causal and not self._hides_future:
            conditions.append(g.op("Less", self._distance(), g.ints(0)))
        return conditions


def distances(g: GraphBuilder, queries: ir.Value, cached_keys: ir.Value, *key_positions: ir.Value) -> ir.Value:
    """Positions of queries minus positions of keys, int64 ``[B, T, K]``.

    Args:
        g: The graph.
        queries: Positions ``[B, T]``.
        cached_keys: The cached keys ``[B, Hkv, S, D]``; row s is the token at position s.
        *key_positions: Positions ``[B, K_i]`` of the keys of the other parts.
    """
    zero, one = g.constant(np.int64(0)), g.constant(np.int64(1))
    cached = g.op("Range", zero, g.op("Squeeze", part_sizes(g, cached_keys)), one)
    rows = g.unsqueeze(queries, 2)
    parts = [g.unsqueeze(cached, 0), *key_positions]
    return g.op("Concat", *[g.op("Sub", rows, g.unsqueeze(part, 1)) for part in parts], axis=2)
