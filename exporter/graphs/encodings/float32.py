"""float32: weights as they are."""

import onnx_ir as ir

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.encodings.encoding import Encoding
from dspark.exporter.packings import FLOAT32

__all__ = ["Float32"]


class Float32(Encoding):
    """Nothing is rounded."""

    def multiply(self, g: GraphBuilder, x: ir.Value, name: str, weight: LazyTensor) -> ir.Value:
        """A Gemm; the weight stays ``[out, in]`` as checkpoints store it."""
        (stored,) = g.packed(name, weight, FLOAT32)
        return g.op("Gemm", x, stored, transB=1)

    def look_up(self, g: GraphBuilder, ids: ir.Value, name: str, table: LazyTensor) -> ir.Value:
        """A Gather."""
        (stored,) = g.packed(name, table, FLOAT32)
        return g.op("Gather", stored, ids, axis=0)
