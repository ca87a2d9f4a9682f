"""GGUF files: their metadata, and their tensors dequantised a few rows at a time.

The layout is the public GGUF specification's (ggml-org/ggml, ``docs/gguf.md``). The header is read here because the
``gguf`` package takes seconds for the hundred thousand strings of a vocabulary; its constants and its dequantisation
are used as they are.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from numpy.typing import NDArray

from dspark.exporter.checkpoints.files import has_file
from dspark.exporter.checkpoints.gguf_metadata import GgufMetadata
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.errors import CheckpointError

__all__ = ["GgufFile", "GgufTensor", "is_gguf_file", "read_gguf_file"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)

SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}


class GgufTensor(LazyTensor):
    """A tensor of a GGUF file; quantisation blocks lie within rows, so that any rows can be read alone.

    Args:
        name: The file and the tensor's name in it, for messages.
        path: The file.
        offset: First byte of the tensor.
        shape: Its dimensions, outermost first.
        kind: How its values are stored.
    """

    def __init__(
        self, name: str, path: Path, offset: int, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
    ) -> None:
        self.name = name
        self.shape = shape or (1,)
        self._path = path
        self._offset = offset
        self._kind = kind
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if self.shape[-1] % block_size:
            raise CheckpointError(
                f"{name}: rows of {self.shape[-1]} values are not whole {kind.name} blocks of {block_size}."
            )
        self._row_bytes = self.shape[-1] // block_size * block_bytes

    @property
    def end(self) -> int:
        """The byte after the tensor's last one."""
        return self._offset + math.prod(self.shape[:-1]) * self._row_bytes

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start … stop − 1`` as float32."""
        if len(self.shape) == 1:
            return self._dequantised(0, 1)[0, start:stop]
        inner = math.prod(self.shape[1:-1])
        return self._dequantised(start * inner, stop * inner).reshape(stop - start, *self.shape[1:])

    def _dequantised(self, start: int, stop: int) -> NDArray[np.float32]:
        with self._path.open("rb") as file:
            file.seek(self._offset + start * self._row_bytes)
            data = np.fromfile(file, np.uint8, (stop - start) * self._row_bytes)
        values: NDArray[np.float32] = gguf.dequantize(data.reshape(stop - start, self._row_bytes), self._kind)
        return values


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds.

    Attributes:
        path: The file.
        metadata: Its keys and values.
        tensors: By the file's own names, in its order.
    """

    path: Path
    metadata: GgufMetadata
    tensors: dict[str, GgufTensor]


def is_gguf_file(path: Path) -> bool:
    """Whether a path is a GGUF file by its first bytes, whatever its name, or is called one.

    Raises:
        CheckpointError: If it is a file that cannot be read, or a Git LFS pointer.
    """
    if path.is_dir():
        return False
    if path.suffix == ".gguf" or not has_file(path):
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_file(path: Path) -> GgufFile:
    """Reads a GGUF file's header and finds its tensors.

    Args:
        path: A little-endian GGUF file of version 2 or 3.

    Returns:
        Its metadata and tensors; tensor data stays on disk.

    Raises:
        CheckpointError: If it is no such file, is cut short, or stores a tensor in a way that cannot be read.
    """
    try:
        has_file(path)
        with path.open("rb") as file:
            return _Header(path, file).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


class _Header:
    """Reads the parts of a header in the order in which they lie in the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size

    def read(self) -> GgufFile:
        if self._take(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{self._path} is no GGUF file: it does not start with 'GGUF'.")
        version = self._number("I")
        if version and not version & 0xFFFF:
            raise CheckpointError(f"{self._path} is a big-endian GGUF file; convert it to little-endian.")
        if version not in VERSIONS:
            raise CheckpointError(f"{self._path} has GGUF version {version}; versions {VERSIONS} can be read.")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        values = {}
        for _ in range(key_count):
            key = self._string()
            values[key] = self._value(self._number("I"))
        metadata = GgufMetadata(str(self._path), values)
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.find(int, "general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if alignment < 1:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}; a positive number is needed.")
        data = -(-self._file.tell() // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, data + offset) for name, shape, kind, offset in infos}
        return GgufFile(self._path, metadata, tensors)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = [self._number("Q") for _ in range(self._number("I"))]
        return name, tuple(reversed(dimensions)), self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        label = f"{self._path.name}: {name}"
        tensor = GgufTensor(label, self._path, offset, shape, _quantisation(label, kind))
        if tensor.end > self._size:
            raise CheckpointError(f"{label} ends at byte {tensor.end}, but the file has {self._size}: it is cut short.")
        return tensor

    def _value(self, kind: int) -> Any:
        if kind == gguf.GGUFValueType.STRING:
            return self._string()
        if kind == gguf.GGUFValueType.ARRAY:
            element, length = self._number("I"), self._number("Q")
            if element in SCALARS:
                code = SCALARS[gguf.GGUFValueType(element)]
                return list(struct.unpack(f"<{length}{code}", self._take(length * struct.calcsize(code))))
            return [self._value(element) for _ in range(length)]
        if kind == gguf.GGUFValueType.FLOAT32:
            # Written from a decimal of a config: its shortest spelling is that decimal, the float32 is only near it.
            return float(str(np.float32(self._number("f"))))
        if kind not in SCALARS:
            raise CheckpointError(f"{self._path} has a metadata value of type {kind}, which GGUF does not define.")
        return self._number(SCALARS[gguf.GGUFValueType(kind)])

    def _string(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path} has a text in its header that is not UTF-8: {error}.") from error

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, count: int) -> bytes:
        # A length beyond the file's would be allocated before the read falls short.
        data = self._file.read(count) if count <= self._size else b""
        if len(data) != count:
            raise CheckpointError(f"{self._path} is cut short: its header goes on past its {self._size} bytes.")
        return data


def _quantisation(label: str, kind: int) -> gguf.GGMLQuantizationType:
    """The quantisation type of that number, if it can be dequantised."""
    try:
        quantisation = gguf.GGMLQuantizationType(kind)
    except ValueError as error:
        raise CheckpointError(f"{label} has the unknown quantisation type {kind}.") from error
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[quantisation][1]), np.uint8), quantisation)
    except NotImplementedError as error:
        raise CheckpointError(f"{label} is stored as {quantisation.name}, which cannot be dequantised.") from error
    return quantisation
