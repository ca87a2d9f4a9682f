"""The gated feed-forward half of a layer."""

import onnx_ir as ir

from dspark.exporter.graphs.layers.linear import linear
from dspark.exporter.graphs.layers.model import Model
from dspark.exporter.graphs.layers.norm import rms_norm

__all__ = ["feed_forward"]


def feed_forward(model: Model, x: ir.Value, layer: int) -> ir.Value:
    """``x + down(silu(gate(norm x)) ⊙ up(norm x))`` of ``[N, H]`` rows in a layer, by its index."""
    g, prefix = model.g, f"layers.{layer}"
    with g.scope("mlp"):
        normed = rms_norm(model, x, f"{prefix}.post_attention_layernorm")
        gate, up = g.split(linear(model, normed, f"{prefix}.mlp.gate_up_proj"), [model.backbone.intermediate_size] * 2)
        activated = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        return g.op("Add", x, linear(model, activated, f"{prefix}.mlp.down_proj"))
