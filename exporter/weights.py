"""The bundle's one file of weights, written tensor by tensor as the graphs ask for them."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.errors import CheckpointError, ExportError
from dspark.exporter.packings import Packing

__all__ = ["WeightFile"]

ALIGNMENT = 64
"""Bytes: a cache line, and enough for every vector load of a kernel that reads the mapped file in place."""


class WeightFile:
    """Streams tensors into one file and hands out references to them.

    A tensor is stored once: asked for again, or equal to one already stored (a tied LM head, a drafter's copy of the
    target's embedding), it becomes a reference to the same bytes.

    Args:
        path: The file to write.
        on_bytes: Called with the number of bytes of every piece read, as float32, for a progress bar.
    """

    def __init__(self, path: Path, on_bytes: Callable[[int], None]) -> None:
        self._path = path
        self._file = path.open("wb")
        self._on_bytes = on_bytes
        self._stored: dict[tuple[int, Packing], tuple[LazyTensor, list[ir.ExternalTensor]]] = {}
        self._by_content: dict[bytes, list[ir.ExternalTensor]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, tensor: LazyTensor, packing: Packing) -> list[ir.ExternalTensor]:
        """Stores a tensor unless it is there already, packed alike.

        Args:
            tensor: What to store; it is read a few megabytes at a time.
            packing: What its rows become.

        Returns:
            References by file, offset and length that graphs carry instead of the data, one for each array of the
            packing.

        Raises:
            CheckpointError: The tensor has a NaN or an infinity.
            ExportError: It cannot be packed.
        """
        key = (id(tensor), packing)
        known = self._stored.get(key)
        if known is not None:
            return known[1]
        references = self._write(tensor, packing)
        self._stored[key] = (tensor, references)  # holding the tensor keeps its id from being reused
        return references

    def _write(self, tensor: LazyTensor, packing: Packing) -> list[ir.ExternalTensor]:
        end = self._file.tell()
        offset = self._align()
        digest = hashlib.sha256(f"{packing} {tensor.shape}".encode())
        dtype: np.dtype[Any] = np.dtype(np.float32)
        shape = tensor.shape
        scales: list[tuple[NDArray[np.generic], ...]] = []
        for chunk in tensor.chunks():
            if not np.isfinite(chunk).all():
                raise CheckpointError(f"{tensor.name}: has values that are not finite numbers")
            try:
                packed, *others = packing.pack(chunk)
            except ExportError as error:
                raise ExportError(f"{tensor.name}: {error}") from error
            dtype, shape = packed.dtype, (tensor.shape[0], *packed.shape[1:])
            data = packed.tobytes()
            digest.update(data)
            self._file.write(data)
            scales.append(tuple(others))
            self._on_bytes(chunk.nbytes)
        twin = self._by_content.get(digest.digest())
        if twin is not None:
            self._file.truncate(end)
            self._file.seek(end)
            return twin
        references = [self._reference(tensor.name, offset, dtype, shape)]
        for parts in zip(*scales, strict=True):
            whole = np.concatenate(parts)
            offset = self._align()
            self._file.write(whole.tobytes())
            references.append(self._reference(tensor.name, offset, whole.dtype, whole.shape))
        self._by_content[digest.digest()] = references
        return references

    def _align(self) -> int:
        """Moves to the next place where a tensor may begin."""
        end = self._file.tell()
        return self._file.seek(end + -end % ALIGNMENT)

    def _reference(self, name: str, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ir.ExternalTensor:
        """What was written from ``offset`` up to here."""
        return ir.ExternalTensor(
            self._path.name,
            offset,
            self._file.tell() - offset,
            ir.DataType.from_numpy(dtype),
            shape=ir.Shape(shape),
            name=name,
            base_dir=self._path.parent,
        )
