"""Memory of a CUDA device and copies on a stream, through the runtime bindings of cuda-python."""

import ctypes
import math
import weakref
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dspark.providers.errors import ProviderError
from dspark.providers.session import Buffer

__all__ = ["Cuda", "CudaArray", "host_array"]

RUNTIME = "cuda.bindings.runtime"
INSTALL_HINT = "CUDA's Python bindings are not installed; pip install cuda-bindings, of the driver's version of CUDA"


class Cuda:
    """The current device and one stream of its own.

    Attributes:
        stream: The stream's handle.

    Raises:
        ProviderError: cuda-python is not installed, or there is no device.
    """

    def __init__(self) -> None:
        try:
            self._runtime: Any = import_module(RUNTIME)
        except ImportError as error:
            raise ProviderError(INSTALL_HINT) from error
        self.stream = int(self.call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking))
        weakref.finalize(self, self._runtime.cudaStreamDestroy, self.stream)

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls a function of the CUDA runtime; returns what it returns besides its status.

        Raises:
            ProviderError: It failed.
        """
        status, *values = getattr(self._runtime, function)(*arguments)
        if int(status) != 0:
            _, text = self._runtime.cudaGetErrorString(status)
            raise ProviderError(f"{function} failed: {text.decode()} (CUDA error {int(status)})")
        return values[0] if values else None

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> "CudaArray":
        """Allocates an array of zeros on the device."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        address = int(self.call("cudaMalloc", max(nbytes, 1)))
        array = CudaArray(self, _Memory(self._runtime.cudaFree, address), address, shape, dtype)
        self.call("cudaMemsetAsync", address, 0, nbytes, self.stream)
        return array

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocates page-locked host memory, which the device copies from and to without detours."""
        address = int(self.call("cudaMallocHost", max(nbytes, 1)))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, self._runtime.cudaFreeHost, address)
        array: NDArray[np.uint8] = np.ctypeslib.as_array(memory)  # keeps the memory
        return array

    def upload(self, destination: int, source: NDArray[Any], nbytes: int) -> None:
        """Begins to copy the first bytes of a host array to the device."""
        self._copy(destination, source.ctypes.data, nbytes, "cudaMemcpyHostToDevice")

    def download(self, destination: NDArray[Any], source: int, nbytes: int) -> None:
        """Begins to copy from the device to the first bytes of a host array."""
        self._copy(destination.ctypes.data, source, nbytes, "cudaMemcpyDeviceToHost")

    def move(self, destination: int, source: int, nbytes: int) -> None:
        """Begins to copy within the device."""
        self._copy(destination, source, nbytes, "cudaMemcpyDeviceToDevice")

    def synchronize(self) -> None:
        """Waits for everything on the stream."""
        self.call("cudaStreamSynchronize", self.stream)

    def _copy(self, destination: int, source: int, nbytes: int, kind: str) -> None:
        direction = getattr(self._runtime.cudaMemcpyKind, kind)
        self.call("cudaMemcpyAsync", destination, source, nbytes, direction, self.stream)


class _Memory:
    """A piece of memory, freed with the last array in it."""

    def __init__(self, free: Any, address: int) -> None:
        weakref.finalize(self, free, address)


class CudaArray:
    """An array in the device's memory; see ``DeviceArray``. Made by ``Cuda.zeros``.

    Attributes:
        address: Of its first element.
        nbytes: Its size.
    """

    def __init__(self, cuda: Cuda, memory: _Memory, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._cuda = cuda
        self._memory = memory
        self.address = address
        self.shape = tuple(shape)
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize

    def __getitem__(self, index: tuple[int | slice, ...]) -> "CudaArray":
        """A contiguous part; see ``DeviceArray``."""
        address, shape = self.address, self.shape
        for position, item in enumerate(index):
            length, *rest = shape
            stride = math.prod(rest) * self.dtype.itemsize
            if isinstance(item, slice):
                if item.step not in (None, 1) or position < len(index) - 1:
                    raise IndexError(f"{index} is no contiguous part of an array {list(self.shape)}")
                first, stop, _ = item.indices(length)
                address, shape = address + first * stride, (max(stop - first, 0), *rest)
            else:
                address, shape = address + range(length)[item] * stride, tuple(rest)
        return CudaArray(self._cuda, self._memory, address, shape, self.dtype)

    def read(self) -> NDArray[Any]:
        """A copy on the host."""
        values = np.empty(self.shape, self.dtype)
        self._cuda.download(values, self.address, self.nbytes)
        self._cuda.synchronize()
        return values

    def write(self, values: Buffer) -> None:
        """Overwrites it; see ``DeviceArray``."""
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ProviderError(
                f"{values.dtype} {list(values.shape)} does not fit a device array {self.dtype} {list(self.shape)}"
            )
        if isinstance(values, CudaArray):
            self._cuda.move(self.address, values.address, self.nbytes)
        else:
            self._cuda.upload(self.address, np.ascontiguousarray(host_array(values)), self.nbytes)
        self._cuda.synchronize()


def host_array(array: Buffer) -> NDArray[Any]:
    """A buffer that must lie on the host.

    Raises:
        ProviderError: It lies on a device of another kind.
    """
    if not isinstance(array, np.ndarray):
        raise ProviderError(f"a {type(array).__name__} cannot be used by a CUDA device; use its own device arrays")
    return array
