"""Eight-bit integers: with rounded activations (``Int8``), or for the weights alone (``Int8Weights``)."""

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import FLOAT, MICROSOFT, GraphBuilder
from dspark.exporter.graphs.encodings.encoding import Encoding
from dspark.exporter.packings import INT8, INT8_LARGEST, ROTATED_INT8, Packing
from dspark.exporter.rotation import block_size, hadamard

__all__ = ["Int8", "Int8Weights"]

ZERO_POINT = np.uint8(128)
"""Kernels for unsigned times signed bytes are many times faster than those for signed times signed ones."""


class Int8Weights(Encoding):
    """Weights in whole numbers with one scale an output channel, multiplied in whatever the device likes."""

    def multiply(self, g: GraphBuilder, x: ir.Value, name: str, weight: LazyTensor) -> ir.Value:
        """A Gemm over dequantised weights, the pattern that device compilers recognise and keep compressed."""
        stored, scales = g.packed(name, weight, INT8)
        return g.op("Gemm", x, g.op("DequantizeLinear", stored, scales, axis=0), transB=1)

    def look_up(self, g: GraphBuilder, ids: ir.Value, name: str, table: LazyTensor) -> ir.Value:
        """Rows times their scales."""
        return _scaled_rows(g, ids, name, table, INT8)


class Int8(Encoding):
    """Whole-number products: activations have one scale a token, weights one an output channel, both after a rotation.

    A token's result must not depend on what is verified beside it, or speculation would change the output: hence no
    scale over a whole tensor. Sums of whole numbers are exact in any order.
    """

    rounds_inputs = True

    def multiply(self, g: GraphBuilder, x: ir.Value, name: str, weight: LazyTensor) -> ir.Value:
        """ONNX Runtime's QGemm; unlike MatMulInteger it reads weights as ``[out, in]``, so tables can be shared."""
        # ONNX Runtime rewrites signed weights for processors without VNNI, and fails where several nodes read them.
        stored, scales = g.packed(name, weight, ROTATED_INT8, own=True)
        zeros = g.own(f"{name}.zero_point", ir.tensor(np.zeros(weight.shape[0], np.int8)))
        rounded, largest = g.once(x, "int8", lambda: self._round(g, x, weight.shape[1]))
        step, zero_point = self._steps(g)
        product = g.op("QGemm", rounded, step, zero_point, stored, scales, zeros, domain=MICROSOFT, transB=1)
        return g.op("Mul", product, largest)

    def look_up(self, g: GraphBuilder, ids: ir.Value, name: str, table: LazyTensor) -> ir.Value:
        """Rows times their scales, rotated back."""
        width = table.shape[1]
        rows = _rotated(g, _scaled_rows(g, ids, name, table, ROTATED_INT8), width)
        return g.reshape(rows, -1, width)

    def _round(self, g: GraphBuilder, x: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
        """Whole numbers ``[N, in]`` around the zero point, and each row's largest magnitude ``[N, 1]``.

        A row of zeros divides by zero; whatever is made of that is multiplied by zero again.
        """
        rotated = g.reshape(_rotated(g, x, width), -1, width)
        largest = g.op("ReduceMax", g.op("Abs", rotated), g.ints(1), keepdims=1)
        return g.op("QuantizeLinear", g.op("Div", rotated, largest), *self._steps(g)), largest

    def _steps(self, g: GraphBuilder) -> tuple[ir.Value, ir.Value]:
        """Scale and zero point of activations between −1 and 1."""
        return g.constant(np.float32(1 / INT8_LARGEST)), g.constant(ZERO_POINT)


def _scaled_rows(g: GraphBuilder, ids: ir.Value, name: str, table: LazyTensor, packing: Packing) -> ir.Value:
    stored, scales = g.packed(name, table, packing)
    rows = g.op("Cast", g.op("Gather", stored, ids, axis=0), to=FLOAT)
    return g.op("Mul", rows, g.op("Unsqueeze", g.op("Gather", scales, ids, axis=0), g.ints(-1)))


def _rotated(g: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
    """``x [N, width]`` rotated in blocks, ``[N, blocks, block]``."""
    size = block_size(width)
    return g.op("MatMul", g.reshape(x, -1, width // size, size), g.constant(hadamard(size)))
