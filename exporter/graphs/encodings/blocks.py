"""Integers in blocks along the input, as ONNX Runtime's MatMulNBits reads them."""

import onnx_ir as ir

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import MICROSOFT, GraphBuilder
from dspark.exporter.graphs.encodings.encoding import Encoding
from dspark.exporter.packings import BlockPacking

__all__ = ["Blocks"]


class Blocks(Encoding):
    """Round to nearest.

    Args:
        bits: Of a weight, 4 or 8.
        block_size: Inputs that share a scale; 16, 32, 64, 128 or 256.
        accuracy_level: Least precision of the activations: 1 float32, 2 float16, 3 bfloat16, 4 int8; 0 leaves it to
            the device.
    """

    rounds_inputs = True

    def __init__(self, bits: int, block_size: int, accuracy_level: int) -> None:
        self._packing = BlockPacking(bits, block_size)
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
            bits=self._packing.bits,
            block_size=self._packing.block_size,
            accuracy_level=self._accuracy_level,
        )

    def look_up(self, g: GraphBuilder, ids: ir.Value, name: str, table: LazyTensor) -> ir.Value:
        """Not for tables: a row would have to be unpacked by the graph, so profiles give tables another encoding."""
        raise NotImplementedError(f"{name}: tables have no encoding in blocks")
