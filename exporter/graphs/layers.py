"""The layers of which target and drafter graphs are made.

Tokens are flat (``[N, H]``) in everything but attention, which is regrouped per request (``[B, heads, T, D]``). Only
standard operators are used, and attention is fully decomposed: that is what every execution provider places.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Protocol

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.description import Backbone, Layer, Rope
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import FLOAT, GraphBuilder
from dspark.runtime.bundle.contract import MASKED

__all__ = [
    "AttentionBias",
    "BlockTokens",
    "Extend",
    "KeyValue",
    "RaggedTokens",
    "Rotation",
    "after",
    "attention",
    "cached_rows",
    "decoder_layer",
    "distances",
    "embed",
    "feed_forward",
    "heads",
    "linear",
    "part_sizes",
    "rms_norm",
    "rotation",
    "unsqueeze",
]

Tensors = Mapping[str, LazyTensor]
KeyValue = tuple[ir.Value, ir.Value]
Extend = Callable[[KeyValue], Sequence[KeyValue]]
"""From the tokens' own keys and values to all that they attend to, in the order of the bias."""


def linear(g: GraphBuilder, x: ir.Value, tensors: Tensors, name: str) -> ir.Value:
    """``x Wᵀ + b`` of flat ``[N, in]`` rows."""
    weight, bias = f"{name}.weight", f"{name}.bias"
    product = g.encodings.of(name).multiply(g, x, weight, tensors[weight])
    return g.op("Add", product, g.weight(bias, tensors[bias])) if bias in tensors else product


def after(*parts: KeyValue) -> Extend:
    """Attention to these keys and values first, and then to the tokens' own."""
    return lambda own: [*parts, own]


def cached_rows(g: GraphBuilder, names: tuple[str, str], backbone: Backbone) -> KeyValue:
    """Declares a layer's cached keys and values as inputs ``[B, Hkv, S, D]``."""
    key, value = (g.input(name, FLOAT, "B", backbone.kv_head_count, "S", backbone.head_dim) for name in names)
    return key, value


def embed(g: GraphBuilder, ids: ir.Value, tensors: Tensors, name: str) -> ir.Value:
    """Rows of an embedding table ``[V, H]``."""
    key = f"{name}.weight"
    return g.encodings.tables.look_up(g, ids, key, tensors[key])


def unsqueeze(g: GraphBuilder, x: ir.Value, *axes: int) -> ir.Value:
    """Inserts dimensions of one."""
    return g.op("Unsqueeze", x, g.ints(*axes))


def rms_norm(g: GraphBuilder, x: ir.Value, tensors: Tensors, name: str, epsilon: float) -> ir.Value:
    """``x / √(mean(x²) + ε) · weight`` over the last axis."""
    key = f"{name}.weight"
    # Pow, not Mul: this is the pattern that ONNX Runtime and device compilers turn into one kernel.
    mean = g.op("ReduceMean", g.op("Pow", x, g.constant(np.float32(2))), g.ints(-1), keepdims=1)
    scale = g.op("Sqrt", g.op("Add", mean, g.floats(epsilon)))
    return g.op("Mul", g.op("Div", x, scale), g.weight(key, tensors[key]))


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
    g: GraphBuilder,
    backbone: Backbone,
    positions: ir.Value,
    layout: "TokenLayout",
    lengths: ir.Value | None = None,
) -> Rotation:
    """Computes the rotation of tokens in the graph, so that no table can be too short for the text.

    Args:
        g: The graph.
        backbone: Frequencies and scaling, and the heads' size.
        positions: int64 ``[N]``.
        layout: How tokens are regrouped.
        lengths: int64 ``[N]``: the text's length that dynamic NTK scaling sees at each token; by default the token's
            own position + 1. Ignored by the other types.
    """
    rope = backbone.rope
    with g.scope("rope"):
        frequencies = g.constant(np.asarray(rope.inverse_frequencies, np.float32)[None])
        if rope.dynamic is not None:
            frequencies = _dynamic_frequencies(g, rope, lengths or g.op("Add", positions, g.ints(1)))
        angles = g.op("Mul", unsqueeze(g, g.op("Cast", positions, to=FLOAT), 1), frequencies)
        cos, sin = g.op("Cos", angles), g.op("Sin", angles)
        if rope.magnitude != 1.0:
            cos, sin = (g.op("Mul", table, g.floats(rope.magnitude)) for table in (cos, sin))
        tables = g.op("Concat", cos, cos, axis=-1), g.op("Concat", g.op("Neg", sin), sin, axis=-1)
        cos, sin = (layout.group(g, unsqueeze(g, table, 1), 1, rope.rotary_dim) for table in tables)
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
    return g.op("Pow", unsqueeze(g, base, 1), exponents)


class TokenLayout(Protocol):
    """How flat rows are regrouped for attention."""

    def group(self, g: GraphBuilder, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
        """``[N, heads, D]`` → ``[B, heads, T, D]``."""

    def flatten(self, g: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
        """``[B, heads, T, D]`` → ``[N, width]``."""


@dataclass(frozen=True)
class RaggedTokens:
    """Requests of different lengths: two index inputs say where each flat token belongs (DESIGN: flat tokens)."""

    pad_index: ir.Value
    unpad_index: ir.Value

    def group(self, g: GraphBuilder, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
        """``[N, heads, D]`` → ``[B, heads, T, D]``."""
        return g.op("Transpose", g.op("Gather", x, self.pad_index, axis=0), perm=[0, 2, 1, 3])

    def flatten(self, g: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
        """``[B, heads, T, D]`` → ``[N, width]``."""
        rows = g.reshape(g.op("Transpose", x, perm=[0, 2, 1, 3]), -1, width)
        return g.op("Gather", rows, self.unpad_index, axis=0)


@dataclass(frozen=True)
class BlockTokens:
    """Requests with the same number of tokens, ``N = B · T``.

    Attributes:
        shape: int64 ``[2]``: B and T; −1 infers one of them.
    """

    shape: ir.Value

    def group(self, g: GraphBuilder, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
        """``[N, heads, D]`` → ``[B, heads, T, D]``."""
        blocks = g.op("Reshape", x, g.op("Concat", self.shape, g.ints(heads, head_dim), axis=0))
        return g.op("Transpose", blocks, perm=[0, 2, 1, 3])

    def flatten(self, g: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
        """``[B, heads, T, D]`` → ``[N, width]``."""
        return g.reshape(g.op("Transpose", x, perm=[0, 2, 1, 3]), -1, width)


class AttentionBias:
    """The additive bias of every kind of layer, computed once a graph.

    Queries of a group of heads that share keys are stacked (``G · T`` rows), so the bias is repeated G times.

    Args:
        g: The graph.
        bias: ``[B, 1, T, K]`` or, the same for all queries, ``[B, 1, 1, K]``: zero or ``MASKED``.
        distance: Computes each query's position minus each key's, int64 ``[B, T, K]``; called if a layer needs it.
        group_size: Query heads a key head (G).
        hides_future: Whether ``bias`` is causal already.
    """

    def __init__(
        self,
        g: GraphBuilder,
        bias: ir.Value,
        distance: Callable[[], ir.Value],
        group_size: int,
        *,
        hides_future: bool,
    ) -> None:
        self._g = g
        self._bias = bias
        self._distance = cache(distance)
        self._group_size = group_size
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
            bias = g.op("Add", bias, unsqueeze(g, mask, 1))
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
    rows = unsqueeze(g, queries, 2)
    parts = [unsqueeze(g, cached, 0), *key_positions]
    return g.op("Concat", *[g.op("Sub", rows, unsqueeze(g, part, 1)) for part in parts], axis=2)


def attend(
    g: GraphBuilder,
    query: ir.Value,
    parts: Sequence[KeyValue],
    bias: ir.Value,
    sizes: ir.Value | None,
    backbone: Backbone,
) -> ir.Value:
    """Attention over keys that lie in several places: one softmax over all, and none of them is copied.

    Args:
        g: The graph.
        query: ``[B, Hq, T, D]``.
        parts: Keys and values ``[B, Hkv, K_i, D]``.
        bias: ``[B, 1, G · T or 1, ΣK_i]``.
        sizes: int64 ``[parts]``: the K_i; None if there is but one.
        backbone: Head counts.

    Returns:
        ``[B, Hq, T, D]``.
    """
    query = g.reshape(query, 0, backbone.kv_head_count, -1, backbone.head_dim)
    query = g.op("Mul", query, g.floats(backbone.head_dim**-0.5))  # just before the product, which can take it in
    scores = [g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2])) for key, _ in parts]
    joined = scores[0] if sizes is None else g.op("Concat", *scores, axis=-1)
    weights = g.op("Softmax", g.op("Add", joined, bias), axis=-1)
    per_part = [weights] if sizes is None else g.split(weights, sizes, count=len(parts))
    mixed = [g.op("MatMul", part, value) for part, (_, value) in zip(per_part, parts, strict=True)]
    return g.reshape(reduce(lambda a, b: g.op("Add", a, b), mixed), 0, backbone.head_count, -1, backbone.head_dim)


def part_sizes(g: GraphBuilder, *keys: ir.Value) -> ir.Value:
    """int64 ``[parts]``: how many keys ``[B, Hkv, K, D]`` each part has."""
    return g.op("Concat", *[g.op("Shape", key, start=2, end=3) for key in keys], axis=0)


def heads(
    g: GraphBuilder,
    x: ir.Value,
    tensors: Tensors,
    prefix: str,
    letters: str,
    backbone: Backbone,
    rotation: Rotation,
    layout: TokenLayout,
) -> list[ir.Value]:
    """Queries, keys and values: projection, regrouping, norm (where the model has one), rotation.

    Args:
        g: The graph.
        x: Attention input ``[N, in]``.
        tensors: The model's tensors.
        prefix: The attention's name, ``layers.0.self_attn``.
        letters: What is wanted, ``qkv`` or ``kv``.
        backbone: Head counts.
        rotation: The tokens' rotation.
        layout: How tokens are regrouped.

    Returns:
        ``[B, heads, T, D]`` of each letter.
    """
    counts = [backbone.head_count if letter == "q" else backbone.kv_head_count for letter in letters]
    with g.scope(f"{letters}_proj"):
        names = [letters] if f"{prefix}.{letters}_proj.weight" in tensors else ["q", "kv"]
        parts = [linear(g, x, tensors, f"{prefix}.{name}_proj") for name in names]
        projected = g.op("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]
        whole = layout.group(
            g, g.reshape(projected, -1, sum(counts), backbone.head_dim), sum(counts), backbone.head_dim
        )
        turning, value = g.split(whole, [sum(counts[:-1]), counts[-1]], axis=1)
        if f"{prefix}.k_norm.weight" in tensors:
            turning = _normed_heads(g, turning, tensors, prefix, letters[:-1], counts[:-1], backbone.norm_epsilon)
        turning = rotation.apply(g, turning, backbone.head_dim)
        turned = g.split(turning, counts[:-1], axis=1) if len(counts) > 2 else [turning]
    return [*turned, value]


def _normed_heads(
    g: GraphBuilder,
    x: ir.Value,
    tensors: Tensors,
    prefix: str,
    letters: str,
    counts: Sequence[int],
    epsilon: float,
) -> ir.Value:
    """Queries and keys ``[B, heads, T, D]`` side by side, normed a head."""
    parts = g.split(x, counts, axis=1) if len(counts) > 1 else [x]
    normed = [
        rms_norm(g, part, tensors, f"{prefix}.{letter}_norm", epsilon)
        for part, letter in zip(parts, letters, strict=True)
    ]
    return g.op("Concat", *normed, axis=1) if len(normed) > 1 else normed[0]


def attention(
    g: GraphBuilder,
    x: ir.Value,
    tensors: Tensors,
    prefix: str,
    backbone: Backbone,
    rotation: Rotation,
    layout: TokenLayout,
    extend: Extend,
    bias: ir.Value,
    sizes: ir.Value | None,
) -> tuple[ir.Value, KeyValue]:
    """Self-attention of the tokens over what is cached and over themselves.

    Args:
        g: The graph.
        x: Attention input ``[N, in]``.
        tensors: The model's tensors.
        prefix: The attention's name, ``layers.0.self_attn``.
        backbone: Head counts.
        rotation: The tokens' rotation.
        layout: How tokens are regrouped.
        extend: Finds all keys and values, the tokens' own last.
        bias: As in ``attend``.
        sizes: As in ``attend``.

    Returns:
        The attention's output ``[N, H]`` and the tokens' own keys and values.
    """
    query, key, value = heads(g, x, tensors, prefix, "qkv", backbone, rotation, layout)
    own = key, value
    mixed = attend(g, query, extend(own), bias, sizes, backbone)
    rows = layout.flatten(g, mixed, backbone.head_count * backbone.head_dim)
    with g.scope("o_proj"):
        return linear(g, rows, tensors, f"{prefix}.o_proj"), own


def feed_forward(g: GraphBuilder, x: ir.Value, tensors: Tensors, prefix: str, backbone: Backbone) -> ir.Value:
    """``x + down(silu(gate(norm x)) ⊙ up(norm x))`` of the layer named by ``prefix``."""
    with g.scope("mlp"):
        normed = rms_norm(g, x, tensors, f"{prefix}.post_attention_layernorm", backbone.norm_epsilon)
        gate_up = linear(g, normed, tensors, f"{prefix}.mlp.gate_up_proj")
        gate, up = g.split(gate_up, [backbone.intermediate_size] * 2)
        activated = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        return g.op("Add", x, linear(g, activated, tensors, f"{prefix}.mlp.down_proj"))


def decoder_layer(
    g: GraphBuilder,
    x: ir.Value,
    tensors: Tensors,
    index: int,
    backbone: Backbone,
    rotation: Rotation,
    layout: TokenLayout,
    extend: Extend,
    bias: ir.Value,
    sizes: ir.Value | None,
) -> tuple[ir.Value, KeyValue]:
    """A pre-norm decoder layer; arguments as in ``attention``.

    Returns:
        The layer's raw output ``[N, H]`` (what a tap sees) and the tokens' own keys and values.
    """
    prefix = f"layers.{index}"
    with g.scope(prefix):
        normed = rms_norm(g, x, tensors, f"{prefix}.input_layernorm", backbone.norm_epsilon)
        name = f"{prefix}.self_attn"
        mixed, own = attention(g, normed, tensors, name, backbone, rotation, layout, extend, bias, sizes)
        return feed_forward(g, g.op("Add", x, mixed), tensors, prefix, backbone), own
