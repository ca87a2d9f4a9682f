"""How rows of float32 weights become bytes of the file of weights.

A packing looks at one row (output channel) at a time, so that weights are packed as they stream by.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark.exporter.errors import ExportError
from dspark.exporter.rotation import block_size, hadamard

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "INT8", "INT8_LARGEST", "ROTATED_INT8", "BlockPacking", "Packing"]

INT8_LARGEST = 127
"""−128 is not used: the range is the same on both sides."""


class Packing(ABC):
    """Turns rows into arrays with as many rows each. Packings are equal when they pack alike."""

    @abstractmethod
    def pack(self, rows: NDArray[np.float32]) -> tuple[NDArray[np.generic], ...]:
        """The arrays that stand for finite ``rows [n, …]``; the large one first, others are scales.

        Raises:
            ExportError: The rows cannot be packed.
        """


@dataclass(frozen=True)
class _Cast(Packing):
    """Another type of float, rounded to nearest even."""

    type: str

    def pack(self, rows: NDArray[np.float32]) -> tuple[NDArray[np.generic], ...]:
        """One array, of the same shape."""
        with np.errstate(over="ignore"):
            packed = rows.astype(np.dtype(self.type))
        if not np.isfinite(packed).all():
            largest = np.abs(rows).max()
            raise ExportError(f"has a weight of {largest:g}, which {self.type} cannot hold; choose bf16 or fp32")
        return (packed,)


FLOAT32: Packing = _Cast("float32")
FLOAT16: Packing = _Cast("float16")
BFLOAT16: Packing = _Cast(ml_dtypes.bfloat16.__name__)


@dataclass(frozen=True)
class _Int8(Packing):
    """Whole numbers ``[n, in]`` and float32 scales ``[n]``.

    Attributes:
        rotated: Whether rows are rotated first, in blocks.
    """

    rotated: bool

    def pack(self, rows: NDArray[np.float32]) -> tuple[NDArray[np.generic], ...]:
        """A row's largest magnitude becomes ±127; a row of zeros has the scale 1."""
        if self.rotated:
            size = block_size(rows.shape[1])
            rows = (rows.reshape(-1, size) @ hadamard(size)).reshape(rows.shape)
        scales = np.abs(rows).max(axis=1) / np.float32(INT8_LARGEST)
        scales[scales < np.finfo(np.float32).tiny] = 1
        return np.rint(rows / scales[:, None]).astype(np.int8), scales


INT8: Packing = _Int8(rotated=False)
ROTATED_INT8: Packing = _Int8(rotated=True)


@dataclass(frozen=True)
class BlockPacking(Packing):
    """uint8 ``[n, blocks, block size · bits / 8]``, and float32 scales ``[n, blocks]``; the zero is half the range.

    Attributes:
        bits: Per value: 8, or 4 with two values per byte.
        block_size: Inputs that share a scale.
    """

    bits: int
    block_size: int

    def pack(self, rows: NDArray[np.float32]) -> tuple[NDArray[np.generic], ...]:
        """In each block the value farthest from zero becomes the lowest, which uses the range's longer side."""
        zero = 1 << (self.bits - 1)
        missing = -rows.shape[1] % self.block_size
        blocks = np.pad(rows, [(0, 0), (0, missing)]).reshape(len(rows), -1, self.block_size)
        farthest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)
        scales = farthest / np.float32(-zero)
        scales[np.abs(scales) < np.finfo(np.float32).tiny] = 1
        whole = np.clip(np.rint(blocks / scales) + zero, 0, 2 * zero - 1).astype(np.uint8)
        packed = whole if self.bits == 8 else whole[..., ::2] | whole[..., 1::2] << 4
        return packed, scales[..., 0]
