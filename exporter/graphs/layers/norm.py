"""The root mean square norm."""

import numpy as np
import onnx_ir as ir

from dspark.exporter.graphs.layers.model import Model

__all__ = ["rms_norm"]


def rms_norm(model: Model, x: ir.Value, name: str) -> ir.Value:
    """``x / √(mean(x²) + ε) · weight`` over the last axis."""
    g, weight = model.g, f"{name}.weight"
    # Pow, not Mul: this is the pattern that ONNX Runtime and device compilers turn into one kernel.
    mean = g.op("ReduceMean", g.op("Pow", x, g.constant(np.float32(2))), g.ints(-1), keepdims=1)
    scale = g.op("Sqrt", g.op("Add", mean, g.floats(model.backbone.norm_epsilon)))
    return g.op("Mul", g.op("Div", x, scale), g.weight(weight, model.tensors[weight]))
