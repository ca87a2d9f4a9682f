"""Linear layers and the embedding, in the precision that their weights get."""

import onnx_ir as ir

from dspark.exporter.graphs.layers.model import Model

__all__ = ["embed", "linear"]


def linear(model: Model, x: ir.Value, name: str) -> ir.Value:
    """``x Wᵀ + b`` of flat ``[N, in]`` rows."""
    g, tensors = model.g, model.tensors
    weight, bias = f"{name}.weight", f"{name}.bias"
    product = model.encodings.of(name).multiply(g, x, weight, tensors[weight])
    return g.op("Add", product, g.weight(bias, tensors[bias])) if bias in tensors else product


def embed(model: Model, ids: ir.Value) -> ir.Value:
    """Rows ``[N, H]`` of the embedding table for ids ``[N]``."""
    table = "embed_tokens.weight"
    return model.encodings.tables.look_up(model.g, ids, table, model.tensors[table])
