"""float16 and bfloat16: half the bytes, products in that type, everything between them in float32.

Rules cover the values that float16 cannot hold. The residual stream, norms, softmax and attention are float32 in every
encoding. Two kinds of products have inputs or results beyond 65 504 in real models: the MLP's down projection (massive
activations, Sun et al., arXiv:2402.17762) and a drafter's ``fc``, which reads the raw residual stream. Their inputs are
divided by a power of two and their results multiplied by it, which is exact. Logits stay float32.
"""

import onnx_ir as ir

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import FLOAT, GraphBuilder
from dspark.exporter.graphs.encodings.encoding import Encoding
from dspark.exporter.packings import BFLOAT16, FLOAT16, Packing

__all__ = ["BFloat16", "Float16"]

LOGITS = ("lm_head", "markov_head.markov_w2")
"""Products that are compared with each other: 8 bits at a logit of 30 would make ties."""
WIDE = ("fc", "mlp.down_proj")
HEADROOM = 256.0
"""Room above float16's range; 1 / 256 of a typical activation is still a normal number."""


class Float16(Encoding):
    """IEEE half precision."""

    packing: Packing = FLOAT16
    type = ir.DataType.FLOAT16

    def multiply(self, g: GraphBuilder, x: ir.Value, name: str, weight: LazyTensor) -> ir.Value:
        """A Gemm between casts."""
        (stored,) = g.packed(name, weight, self.packing)
        if _ends(name, LOGITS):
            return g.op("Gemm", x, g.op("Cast", stored, to=FLOAT), transB=1)
        if not self._overflows(name):
            return self._product(g, x, stored)
        shrunk = g.op("Mul", x, g.floats(1 / HEADROOM))
        return g.op("Mul", self._product(g, shrunk, stored), g.floats(HEADROOM))

    def look_up(self, g: GraphBuilder, ids: ir.Value, name: str, table: LazyTensor) -> ir.Value:
        """A Gather and a cast."""
        (stored,) = g.packed(name, table, self.packing)
        return g.op("Cast", g.op("Gather", stored, ids, axis=0), to=FLOAT)

    def _overflows(self, name: str) -> bool:
        return _ends(name, WIDE)

    def _product(self, g: GraphBuilder, x: ir.Value, stored: ir.Value) -> ir.Value:
        return g.op("Cast", g.op("Gemm", g.op("Cast", x, to=self.type), stored, transB=1), to=FLOAT)


class BFloat16(Float16):
    """float32's range with 8 bits: nothing overflows."""

    packing = BFLOAT16
    type = ir.DataType.BFLOAT16

    def _overflows(self, name: str) -> bool:
        return False


def _ends(name: str, layers: tuple[str, ...]) -> bool:
    """Whether a weight belongs to one of these layers."""
    layer = name.removesuffix(".weight")
    return any(layer == end or layer.endswith(f".{end}") for end in layers)
