"""Which precision each part of a graph gets."""

from dataclasses import dataclass
from enum import StrEnum

from dspark.exporter.errors import ExportError
from dspark.exporter.graphs.encodings import BFloat16, Blocks, Encoding, Encodings, Float16, Float32, Int8, Int8Weights
from dspark.runtime.bundle.manifest import BlocksInfo

__all__ = ["BITS", "Precision", "PrecisionProfile"]


class Precision(StrEnum):
    """How linear layers store their weights and multiply with them (``graphs.encodings``)."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT8_BLOCKS = "int8-blocks"
    INT8_WEIGHTS = "int8-weights"
    INT4 = "int4"


BITS = {Precision.INT4: 4, Precision.INT8_BLOCKS: 8}
"""Of precisions whose weights lie in blocks."""
BLOCK_SIZES = {Precision.INT4: 32, Precision.INT8_BLOCKS: 64}
"""Unless said otherwise. In larger blocks ONNX Runtime's products of a row depend on the rows beside it."""
ALLOWED_BLOCK_SIZES = (16, 32, 64, 128, 256)
ACCURACY_LEVELS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class PrecisionProfile:
    """Precisions of one graph.

    Attributes:
        linear: Of the linear layers.
        tables: Of embedding and LM head, which are one table in many models.
        block_size: Inputs that share a scale in precisions with blocks.
        accuracy_level: Of their activations, as MatMulNBits counts it: 0 leaves it to the device, 4 allows int8.
    """

    linear: Precision = Precision.FP32
    tables: Precision = Precision.FP32
    block_size: int = 32
    accuracy_level: int = 4

    def __post_init__(self) -> None:
        if self.tables is Precision.INT4:
            raise ExportError("embedding and LM head cannot be int4, which costs too much quality; choose int8 or fp16")
        if self.block_size not in ALLOWED_BLOCK_SIZES:
            raise ExportError(f"the block size is {self.block_size}; it must be one of {ALLOWED_BLOCK_SIZES}")
        if self.accuracy_level not in ACCURACY_LEVELS:
            raise ExportError(f"the accuracy level is {self.accuracy_level}; it must be one of {ACCURACY_LEVELS}")

    @classmethod
    def of(
        cls,
        linear: Precision,
        tables: Precision | None = None,
        block_size: int | None = None,
        accuracy_level: int | None = None,
    ) -> "PrecisionProfile":
        """A profile whose tables follow its linear layers, but for int4, where they are int8."""
        tables = tables or (Precision.INT8 if linear is Precision.INT4 else linear)
        usual = BLOCK_SIZES.get(linear, BLOCK_SIZES.get(tables, cls.block_size))
        return cls(
            linear,
            tables,
            usual if block_size is None else block_size,
            cls.accuracy_level if accuracy_level is None else accuracy_level,
        )

    @property
    def blocks(self) -> BlocksInfo | None:
        """What the manifest says of blocks."""
        if BITS.keys().isdisjoint((self.linear, self.tables)):
            return None
        return BlocksInfo(size=self.block_size, accuracy_level=self.accuracy_level)

    def encodings(self) -> Encodings:
        """How a graph of this profile stores and multiplies."""
        return Encodings(linear=self._encoding(self.linear), tables=self._encoding(self.tables))

    def _encoding(self, precision: Precision) -> Encoding:
        match precision:
            case Precision.FP32:
                return Float32()
            case Precision.FP16:
                return Float16()
            case Precision.BF16:
                return BFloat16()
            case Precision.INT8:
                return Int8()
            case Precision.INT8_WEIGHTS:
                return Int8Weights()
            case Precision.INT8_BLOCKS | Precision.INT4:
                return Blocks(BITS[precision], self.block_size, self.accuracy_level)
