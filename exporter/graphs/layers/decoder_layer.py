"""A decoder layer: attention and feed-forward, each after its norm and around a residual."""

import onnx_ir as ir

from dspark.exporter.graphs.layers.attention import attention
from dspark.exporter.graphs.layers.feed_forward import feed_forward
from dspark.exporter.graphs.layers.forward_pass import ForwardPass
from dspark.exporter.graphs.layers.key_values import KeyValue
from dspark.exporter.graphs.layers.norm import rms_norm

__all__ = ["decoder_layer"]


def decoder_layer(forward: ForwardPass, x: ir.Value, layer: int) -> tuple[ir.Value, KeyValue]:
    """A pre-norm decoder layer.

    Args:
        forward: The pass.
        x: Hidden states ``[N, H]``.
        layer: The layer's index.

    Returns:
        The layer's raw output ``[N, H]`` (what a tap sees) and the tokens' own keys and values.
    """
    model, g = forward.model, forward.model.g
    bias = forward.bias.of(model.backbone.layers[layer])
    with g.scope(f"layers.{layer}"):
        normed = rms_norm(model, x, f"layers.{layer}.input_layernorm")
        mixed, own = attention(forward, normed, layer, bias)
        return feed_forward(model, g.op("Add", x, mixed), layer), own
