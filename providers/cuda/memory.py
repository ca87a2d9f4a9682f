"""Memory of a CUDA device and copies on a stream, through the runtime bindings of cuda-python."""

import ctypes
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from operator import mul
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dspark.providers.errors import ProviderError
from dspark.providers.session import Buffer, Index

__all__ = ["Cuda", "CudaArray", "host_array"]

RUNTIME = "cuda.bindings.runtime"
INSTALL_HINT = "CUDA's Python bindings are not installed; pip install cuda-bindings, of the driver's version of CUDA"


class Cuda:
    """The current device and one stream of its own.

    Attributes:
        runtime: CUDA's runtime bindings.
        stream: The stream's handle.

    Raises:
        ProviderError: cuda-python is not installed, or there is no device.
    """

    def __init__(self) -> None:
        try:
            self.runtime: Any = import_module(RUNTIME)
        except ImportError as error:
            raise ProviderError(INSTALL_HINT) from error
        self.stream = int(self.call("cudaStreamCreateWithFlags", self.runtime.cudaStreamNonBlocking))
        weakref.finalize(self, self.runtime.cudaStreamDestroy, self.stream)

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls a function of the CUDA runtime; returns what it returns besides its status.

        Raises:
            ProviderError: It failed.
        """
        status, *values = getattr(self.runtime, function)(*arguments)
        if int(status) != 0:
            _, text = self.runtime.cudaGetErrorString(status)
            raise ProviderError(f"{function} failed: {text.decode()} (CUDA error {int(status)})")
        return values[0] if values else None

    def device_name(self, index: int | None = None) -> str:
        """Name of a device, by default of the current one.

        Raises:
            ProviderError: There is no such device.
        """
        index = self.call("cudaGetDevice") if index is None else index
        name: bytes = self.call("cudaGetDeviceProperties", index).name
        return name.decode().rstrip("\0")

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> "CudaArray":
        """Allocates an array of zeros on the device."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        address = int(self.call("cudaMalloc", max(nbytes, 1)))
        strides = tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))
        place = Strided(address, tuple(shape), strides, dtype.itemsize)
        array = CudaArray(self, _Memory(self.runtime.cudaFree, address), place, dtype)
        self.call("cudaMemsetAsync", address, 0, nbytes, self.stream)
        self.synchronize()  # others may use it on their streams
        return array

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocates page-locked host memory, which the device copies from and to without detours."""
        address = int(self.call("cudaMallocHost", max(nbytes, 1)))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, self.runtime.cudaFreeHost, address)
        array: NDArray[np.uint8] = np.ctypeslib.as_array(memory)  # keeps the memory
        return array

    def upload(self, destination: int, source: NDArray[Any], nbytes: int) -> None:
        """Begins to copy the first bytes of a contiguous host array to the device."""
        self._copy(destination, source.ctypes.data, nbytes, "cudaMemcpyHostToDevice")

    def download(self, destination: NDArray[Any], source: int, nbytes: int) -> None:
        """Begins to copy from the device to the first bytes of a contiguous host array."""
        self._copy(destination.ctypes.data, source, nbytes, "cudaMemcpyDeviceToHost")

    def copy_planes(self, destination: "Strided", source: "Strided", kind: str) -> None:
        """Begins to copy between arrays of one shape, each with strides of its own.

        Args:
            destination: Where to.
            source: Where from.
            kind: Name of the direction in ``cudaMemcpyKind``.
        """
        direction = getattr(self.runtime.cudaMemcpyKind, kind)
        for (to, to_pitch), (start, pitch), width, rows in _planes(destination, source):
            self.call("cudaMemcpy2DAsync", to, to_pitch, start, pitch, width, rows, direction, self.stream)

    def clear_planes(self, destination: "Strided") -> None:
        """Begins to zero an array with strides."""
        for (start, pitch), _, width, rows in _planes(destination, destination):
            self.call("cudaMemset2DAsync", start, pitch, 0, width, rows, self.stream)

    def synchronize(self) -> None:
        """Waits for everything on the stream."""
        self.call("cudaStreamSynchronize", self.stream)

    def _copy(self, destination: int, source: int, nbytes: int, kind: str) -> None:
        direction = getattr(self.runtime.cudaMemcpyKind, kind)
        self.call("cudaMemcpyAsync", destination, source, nbytes, direction, self.stream)


class _Memory:
    """A piece of memory, freed with the last array in it."""

    def __init__(self, free: Any, address: int) -> None:
        weakref.finalize(self, free, address)


@dataclass(frozen=True)
class Strided:
    """Where the elements of an array lie.

    Attributes:
        address: Of the first.
        shape: The array's shape.
        strides: Bytes from one element to the next along each axis.
        itemsize: Bytes of an element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, array: NDArray[Any]) -> "Strided":
        """Of a host array."""
        return cls(array.ctypes.data, array.shape, array.strides, array.itemsize)

    def part(self, index: Index) -> "Strided":
        """A part of it.

        Raises:
            IndexError: There is no such part.
        """
        items = index if isinstance(index, tuple) else (index,)
        if len(items) > len(self.shape):
            raise IndexError(f"{index} has too many indices for an array {list(self.shape)}")
        items += (slice(None),) * (len(self.shape) - len(items))
        address, shape, strides = self.address, [], []
        for item, length, stride in zip(items, self.shape, self.strides, strict=True):
            if isinstance(item, slice):
                first, stop, step = item.indices(length)
                if step != 1:
                    raise IndexError(f"{index} has a step, which arrays of a device cannot have")
                address += first * stride
                shape.append(max(stop - first, 0))
                strides.append(stride)
            else:
                address += range(length)[item] * stride
        return Strided(address, tuple(shape), tuple(strides), self.itemsize)

    @property
    def run(self) -> int:
        """How many of the last axes lie without gaps."""
        nbytes = self.itemsize
        for count, (length, stride) in enumerate(zip(self.shape[::-1], self.strides[::-1], strict=True)):
            if length != 1 and stride != nbytes:
                return count
            nbytes *= length
        return len(self.shape)


def _planes(first: Strided, second: Strided) -> Iterator[tuple[tuple[int, int], tuple[int, int], int, int]]:
    """Cuts two arrays of one shape into planes of rows without gaps, which CUDA copies at once.

    Yields:
        Address and pitch of a plane in each, bytes of a row, and rows.
    """
    shape = first.shape
    if 0 in shape:
        return
    outer = len(shape) - min(first.run, second.run)
    width = math.prod(shape[outer:]) * first.itemsize
    rows = shape[outer - 1] if outer else 1
    for index in np.ndindex(shape[: max(outer - 1, 0)]):
        places = []
        for each in (first, second):
            offset = sum(map(mul, index, each.strides))
            places.append((each.address + offset, each.strides[outer - 1] if rows > 1 else width))
        yield places[0], places[1], width, rows


class CudaArray:
    """An array in the device's memory; see ``DeviceArray``. Made by ``Cuda.zeros``.

    Attributes:
        address: Of its first element.
        shape: Its shape.
        dtype: Type of its elements.
        nbytes: Bytes of its elements.
        contiguous: Whether they lie without gaps.
    """

    def __init__(self, cuda: Cuda, memory: _Memory, place: Strided, dtype: np.dtype[Any]) -> None:
        self._cuda = cuda
        self._memory = memory
        self._place = place
        self.address = place.address
        self.shape = place.shape
        self.dtype = dtype
        self.nbytes = math.prod(place.shape) * place.itemsize
        self.contiguous = place.run == len(place.shape)

    def __getitem__(self, index: Index) -> "CudaArray":
        """A part; see ``DeviceArray``."""
        return CudaArray(self._cuda, self._memory, self._place.part(index), self.dtype)

    def __setitem__(self, index: Index, values: Buffer | Literal[0]) -> None:
        """Overwrites a part; see ``DeviceArray``."""
        place = self._place.part(index)
        if isinstance(values, int):
            self._cuda.clear_planes(place)
        else:
            if values.shape != place.shape or values.dtype != self.dtype:
                raise ProviderError(
                    f"{values.dtype} {list(values.shape)} does not fit a device array {self.dtype} {list(place.shape)}"
                )
            if isinstance(values, CudaArray):
                self._cuda.copy_planes(place, values._place, "cudaMemcpyDeviceToDevice")
            else:
                self._cuda.copy_planes(place, Strided.of(host_array(values)), "cudaMemcpyHostToDevice")
        self._cuda.synchronize()

    def read(self) -> NDArray[Any]:
        """A copy on the host."""
        values = np.empty(self.shape, self.dtype)
        self._cuda.copy_planes(Strided.of(values), self._place, "cudaMemcpyDeviceToHost")
        self._cuda.synchronize()
        return values


def host_array(array: Buffer) -> NDArray[Any]:
    """A buffer that must lie on the host.

    Raises:
        ProviderError: It lies on a device of another kind.
    """
    if not isinstance(array, np.ndarray):
        raise ProviderError(f"a {type(array).__name__} cannot be used by a CUDA device; use its own device arrays")
    return array
