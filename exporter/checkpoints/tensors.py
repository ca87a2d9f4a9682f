"""Tensors that stay on disk until a few of their rows are needed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["FileTensor", "LazyTensor", "MappedTensor"]

CHUNK_BYTES = 16 << 20


class LazyTensor(ABC):
    """A tensor whose rows (slices along the first axis) are read on demand.

    Attributes:
        name: Where it comes from, for messages.
        shape: Its dimensions; never empty, scalars are ``(1,)``.
    """

    name: str
    shape: tuple[int, ...]

    @abstractmethod
    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start … stop − 1`` as float32, whatever the file holds."""

    def load(self) -> NDArray[np.float32]:
        """The whole tensor as float32; for small ones."""
        return self.rows(0, self.shape[0])

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The tensor in order, a few megabytes at a time."""
        row_bytes = 4 * int(np.prod(self.shape[1:], dtype=np.int64))
        step = max(1, CHUNK_BYTES // max(row_bytes, 1))
        for start in range(0, self.shape[0], step):
            yield self.rows(start, min(start + step, self.shape[0]))


class FileTensor(LazyTensor):
    """A dense row-major tensor at a byte offset of a file.

    It is read, not mapped: mapped pages would count as this process's memory and grow with the model.

    Args:
        name: Where it comes from, for messages.
        path: The file.
        offset: First byte of the tensor.
        shape: Its dimensions.
        dtype: Element type in the file, bfloat16 and float8 included.
    """

    def __init__(self, name: str, path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.name = name
        self.shape = shape or (1,)
        self._path = path
        self._offset = offset
        self._dtype = dtype

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start … stop − 1`` as float32."""
        return self.native_rows(start, stop).astype(np.float32)

    def native_rows(self, start: int, stop: int) -> NDArray[np.generic]:
        """Rows ``start … stop − 1`` in the file's own element type (integer tables such as ``d2t``)."""
        row = int(np.prod(self.shape[1:], dtype=np.int64))
        with self._path.open("rb") as file:
            file.seek(self._offset + start * row * self._dtype.itemsize)
            data = file.read((stop - start) * row * self._dtype.itemsize)
        return np.frombuffer(data, self._dtype).reshape(stop - start, *self.shape[1:])


class MappedTensor(LazyTensor):
    """A tensor computed from another, row range by row range.

    Args:
        source: The tensor it is computed from.
        function: Takes the source's rows, returns as many rows of the new tensor.
        shape: The new tensor's dimensions, when they differ.
    """

    def __init__(
        self,
        source: LazyTensor,
        function: Callable[[NDArray[np.float32]], NDArray[np.float32]],
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.name = source.name
        self.shape = shape or source.shape
        self._source = source
        self._function = function

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start … stop − 1`` of the new tensor."""
        return self._function(self._source.rows(start, stop))


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
