"""How host arrays travel to a CUDA device and back: all inputs of a call in one copy, all outputs in another."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.providers.cuda.memory import Cuda, CudaArray, host_array
from dspark.providers.session import Buffer

__all__ = ["ALIGNMENT", "BoundArrays", "Staging"]

ALIGNMENT = 256
"""Bytes that tensors are aligned to; TensorRT asks for it."""


@dataclass
class Layout:
    """Tensors of a call side by side in a block of memory.

    Attributes:
        nbytes: Size of the block.
        copied: Bytes at its beginning that are copied.
        offsets: Where each tensor begins.
        arrays: The host arrays of those that are copied.
    """

    nbytes: int = 0
    copied: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def add(self, name: str, nbytes: int) -> None:
        """Adds a tensor that stays on the device."""
        self.offsets[name] = self.nbytes
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def add_copied(self, name: str, array: NDArray[Any]) -> None:
        """Adds a tensor that is copied from or to a host array; these come first."""
        self.add(name, array.nbytes)
        self.arrays[name] = array
        self.copied = self.nbytes


@dataclass
class BoundArrays:
    """The arrays of a bound call, which it keeps.

    Attributes:
        resident: Device arrays, used where they lie.
        inputs: Host arrays that are copied to the device.
        outputs: Those that are copied from it.
    """

    resident: dict[str, CudaArray] = field(default_factory=dict)
    inputs: Layout = field(default_factory=Layout)
    outputs: Layout = field(default_factory=Layout)

    def place(self, name: str, array: Buffer, layout: Layout) -> None:
        """Leaves a device array where it is, and makes room for a host array.

        Raises:
            ProviderError: The array lies on a device of another kind.
        """
        if isinstance(array, CudaArray):
            self.resident[name] = array
        else:
            layout.add_copied(name, host_array(array))


class Staging:
    """Page-locked host memory and device memory that all calls of a session use in turn.

    Args:
        cuda: The device, and the stream that copies are enqueued on.

    Attributes:
        moves: Changes when the device memory is another, so that addresses have to be taken again.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._inputs, self._outputs = _Block(cuda), _Block(cuda)
        self.moves = 0

    def reserve(self, arrays: BoundArrays) -> None:
        """Makes room for a call."""
        grown = self._inputs.reserve(arrays.inputs.nbytes), self._outputs.reserve(arrays.outputs.nbytes)
        self.moves += any(grown)

    def addresses(self, arrays: BoundArrays) -> dict[str, int]:
        """Where each tensor lies on the device."""
        return {
            **{name: array.address for name, array in arrays.resident.items()},
            **self._inputs.addresses(arrays.inputs),
            **self._outputs.addresses(arrays.outputs),
        }

    def upload(self, arrays: BoundArrays) -> None:
        """Begins to copy the host inputs to the device."""
        self.reserve(arrays)
        self._inputs.upload(arrays.inputs)

    def download(self, arrays: BoundArrays) -> None:
        """Copies the outputs to the host arrays, when all before it is done."""
        self._outputs.download(arrays.outputs)


class _Block:
    """The memory of one direction."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._pinned = cuda.pinned(ALIGNMENT)
        self._device = cuda.zeros((ALIGNMENT,), np.uint8)

    def reserve(self, nbytes: int) -> bool:
        """Makes room; returns whether the memory is another now."""
        if nbytes <= self._device.nbytes:
            return False
        self._pinned = self._cuda.pinned(nbytes)
        self._device = self._cuda.zeros((nbytes,), np.uint8)
        return True

    def addresses(self, layout: Layout) -> dict[str, int]:
        """Where each tensor lies on the device."""
        return {name: self._device.address + offset for name, offset in layout.offsets.items()}

    def upload(self, layout: Layout) -> None:
        """Begins to copy the host arrays to the device."""
        for name, array in layout.arrays.items():
            self._part(layout, name)[:] = array.reshape(-1).view(np.uint8)
        if layout.copied:
            self._cuda.upload(self._device.address, self._pinned, layout.copied)

    def download(self, layout: Layout) -> None:
        """Copies from the device to the host arrays, when all before it is done."""
        if layout.copied:
            self._cuda.download(self._pinned, self._device.address, layout.copied)
        self._cuda.synchronize()
        for name, array in layout.arrays.items():
            array.reshape(-1).view(np.uint8)[:] = self._part(layout, name)

    def _part(self, layout: Layout, name: str) -> NDArray[np.uint8]:
        first = layout.offsets[name]
        return self._pinned[first : first + layout.arrays[name].nbytes]
