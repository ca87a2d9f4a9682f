"""The bundle's one file of weights, written tensor by tensor as the graphs ask for them."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.errors import CheckpointError

__all__ = ["WeightFile"]

ALIGNMENT = 64
"""Bytes: a cache line, and enough for every vector load of a kernel that reads the mapped file in place."""


class WeightFile:
    """Streams tensors into one file and hands out references to them.

    A tensor is stored once: asked for again, or equal to one already stored (a tied LM head, a drafter's copy of the
    target's embedding), it becomes a reference to the same bytes.

    Args:
        path: The file to write.
        on_bytes: Called with the number of bytes of every piece written, for a progress bar.
    """

    def __init__(self, path: Path, on_bytes: Callable[[int], None]) -> None:
        self._path = path
        self._file = path.open("wb")
        self._on_bytes = on_bytes
        self._stored: dict[int, tuple[LazyTensor, ir.ExternalTensor]] = {}
        self._by_content: dict[bytes, ir.ExternalTensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, tensor: LazyTensor) -> ir.ExternalTensor:
        """Stores a tensor as float32 unless it is there already.

        Args:
            tensor: What to store; it is read a few megabytes at a time.

        Returns:
            A reference by file, offset and length that graphs carry instead of the data.

        Raises:
            CheckpointError: The tensor has a NaN or an infinity.
        """
        known = self._stored.get(id(tensor))
        if known is not None:
            return known[1]
        reference = self._write(tensor)
        self._stored[id(tensor)] = (tensor, reference)  # holding the tensor keeps its id from being reused
        return reference

    def _write(self, tensor: LazyTensor) -> ir.ExternalTensor:
        end = self._file.tell()
        offset = end + -end % ALIGNMENT
        self._file.seek(offset)
        digest = hashlib.sha256(repr(tensor.shape).encode())
        for chunk in tensor.chunks():
            if not np.isfinite(chunk).all():
                raise CheckpointError(f"{tensor.name}: has values that are not finite numbers")
            data = np.ascontiguousarray(chunk, dtype="<f4").data
            digest.update(data)
            self._file.write(data)
            self._on_bytes(data.nbytes)
        length = self._file.tell() - offset
        twin = self._by_content.get(digest.digest())
        if twin is not None:
            self._file.truncate(end)
            self._file.seek(end)
            return twin
        reference = ir.ExternalTensor(
            self._path.name,
            offset,
            length,
            ir.DataType.FLOAT,
            shape=ir.Shape(tensor.shape),
            name=tensor.name,
            base_dir=self._path.parent,
        )
        self._by_content[digest.digest()] = reference
        return reference
