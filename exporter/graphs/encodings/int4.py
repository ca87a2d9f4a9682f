"""Four-bit integers in blocks along the input, as ONNX Runtime's MatMulNBits reads them."""

import onnx_ir as ir

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import MICROSOFT, GraphBuilder
from dspark.exporter.graphs.encodings.encoding import Encoding
from dspark.exporter.packings import Int4Packing

__all__ = ["Int4"]


class Int4(Encoding):
    """Round to nearest.

    Args:
        block_size: Inputs that share a scale; 16, 32, 64, 128 or 256.
        accuracy_level: Least precision of the activations: 1 float32, 2 float16, 3 bfloat16, 4 int8; 0 leaves it to
            the device.
    """

    rounds_inputs = True

    def __init__(self, block_size: int, accuracy_level: int) -> None:
        self._packing = Int4Packing(block_size)
        self._accuracy_level = accuracy_level

    def multiply(self, g: GraphBuilder, x: ir.Value, name: str, weight: LazyTensor) -> ir.Value:
        """A MatMulNBits."""
        stored, scales = g.packed(name, weight, self._packing)
        outputs, inputs = weight.shape
        return g.op(
            *("MatMulNBits", x, stored, scales),
            domain=MICROSOFT,
            K=inputs,
            N=outputs,
            bits=4,
            block_size=self._packing.block_size,
            accuracy_level=self._accuracy_level,
        )

    def look_up(self, g: GraphBuilder, ids: ir.Value, name: str, table: LazyTensor) -> ir.Value:
        """Not for tables: four bits cost an embedding too much, so profiles give tables another encoding."""
        raise NotImplementedError(f"{name}: tables have no int4 encoding")
