"""Integers in blocks along the input, as ONNX Runtime's MatMulNBits reads them."""

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import FLOAT, MICROSOFT, GraphBuilder
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
        """Rows times their blocks' scales; eight bits only: four cost an embedding too much, so no profile asks."""
        assert self._packing.bits == 8, f"{name}: tables have no encoding of four bits"
        stored, scales = (g.op("Gather", part, ids, axis=0) for part in g.packed(name, table, self._packing))
        centred = g.op("Sub", g.op("Cast", stored, to=FLOAT), g.constant(np.float32(128)))
        rows = g.reshape(g.op("Mul", centred, g.op("Unsqueeze", scales, g.ints(2))), 0, -1)
        width, size = table.shape[1], self._packing.block_size
        return rows if width % size == 0 else g.op("Slice", rows, g.ints(0), g.ints(width), g.ints(1))
