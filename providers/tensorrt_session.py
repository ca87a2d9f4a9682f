"""Sessions that run TensorRT engines on one CUDA stream."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dspark.providers.cuda_memory import Cuda, CudaArray, host_array
from dspark.providers.errors import ProviderError
from dspark.providers.session import Buffer, Call
from dspark.providers.tensorrt_engine import Backend, open_engine

__all__ = ["TensorRtSession"]

ALIGNMENT = 256
"""Bytes that tensors must be aligned to."""


class TensorRtSession:
    """A graph's engine; see ``DeviceSession``.

    Host arrays travel through page-locked memory, all inputs in one copy and all outputs in another. What is bound to
    device arrays is not copied. Profile, shapes and addresses are set again only if another call ran in between.

    Args:
        backend: The library.
        graph: The graph's file, beside which the engine lies.

    Raises:
        ProviderError: See ``open_engine``; or the device's memory is full.
    """

    def __init__(self, backend: Backend, graph: Path) -> None:
        trt = backend.load()
        opened = open_engine(backend, graph)
        self._engine, self._errors = opened.native, opened.errors
        self._name = f"{graph.stem} ({backend.name})"
        self._profiles = tuple(opened.key.profiles)
        self.cache_capacity = opened.key.cache_capacity
        self._cuda = Cuda()
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise self._failure("the engine cannot be prepared")
        self._staged_inputs, self._staged_outputs = _Staging(self._cuda), _Staging(self._cuda)
        self._latest: _EngineCall | None = None
        self._types: dict[str, np.dtype[Any]] = {}
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            is_input = self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            (self._inputs if is_input else self._outputs).append(name)
            self._types[name] = np.dtype(trt.nptype(self._engine.get_tensor_dtype(name)))

    def device_array(self, shape: tuple[int, ...], dtype: DTypeLike) -> CudaArray:
        """Allocates an array of zeros on the device."""
        return self._cuda.zeros(shape, dtype)

    def bind(self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> Call:
        """Binds every input and the wanted outputs; see ``DeviceSession``."""
        self._check_names(inputs, outputs)
        self._check_aliases(inputs, outputs)
        shapes = {name: tuple(array.shape) for name, array in inputs.items()}
        call = _EngineCall(self._run, self._choose_profile(shapes), shapes)
        self._activate(call)
        for name in self._inputs:
            call.place(name, inputs[name], call.inputs)
        for name in sorted(self._outputs, key=lambda name: name not in outputs):  # the wanted ones are copied as one
            shape, dtype = tuple(self._context.get_tensor_shape(name)), self._types[name]
            array = outputs.get(name)
            if array is not None and tuple(array.shape) != shape:
                raise ProviderError(
                    f"{self._name}: {name} is bound to shape {list(array.shape)}; the engine computes {list(shape)}"
                )
            if array is None:
                call.outputs.add(name, math.prod(shape) * dtype.itemsize)
            else:
                call.place(name, array, call.outputs)
        return call

    def _check_names(self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> None:
        for bound, known in ((inputs, self._inputs), (outputs, self._outputs)):
            for name, array in bound.items():
                if name not in known:
                    raise ProviderError(f"{self._name}: {name} cannot be bound; the engine has {', '.join(known)}")
                if array.dtype != self._types[name]:
                    raise ProviderError(f"{self._name}: {name} is {array.dtype}; the engine has {self._types[name]}")
        for name in self._inputs:
            if name not in inputs:
                raise ProviderError(f"{self._name}: {name} is not bound")
        for name, array in {**inputs, **outputs}.items():
            if isinstance(array, CudaArray) and not array.contiguous:
                raise ProviderError(f"{self._name}: {name} is bound to an array with gaps")
            if isinstance(array, CudaArray) and array.address % ALIGNMENT:
                raise ProviderError(
                    f"{self._name}: {name} begins {array.address % ALIGNMENT} bytes after a multiple of {ALIGNMENT}, "
                    "which TensorRT does not take"
                )

    def _check_aliases(self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> None:
        """An output that the engine writes in place must be bound to its input's memory."""
        for name in self._outputs:
            source = self._engine.get_aliased_input_tensor(name)
            if source is None:
                continue
            read, written = inputs[source], outputs.get(name)
            if not isinstance(read, CudaArray) or not isinstance(written, CudaArray) or read.address != written.address:
                raise ProviderError(f"{self._name}: {name} must be bound to the same device array as {source}")

    def _choose_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The first profile that allows all shapes.

        Raises:
            ProviderError: There is none; the message says what the nearest one allows.
        """
        misfits = [
            [name for name, shape in shapes.items() if not self._allows(profile, name, shape)]
            for profile in range(len(self._profiles))
        ]
        best = min(range(len(misfits)), key=lambda profile: len(misfits[profile]))
        if misfits[best]:
            name = misfits[best][0]
            low, _, high = self._engine.get_tensor_profile_shape(name, best)
            raise ProviderError(
                f"{self._name}: {name} has shape {list(shapes[name])}; the engine was built for {list(low)} to "
                f"{list(high)} (profile {self._profiles[best]}); compile it for larger batches or longer texts"
            )
        return best

    def _allows(self, profile: int, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = (tuple(each) for each in self._engine.get_tensor_profile_shape(name, profile))
        return len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def _run(self, call: "_EngineCall") -> None:
        moved = self._staged_inputs.reserve(call.inputs.nbytes), self._staged_outputs.reserve(call.outputs.nbytes)
        if any(moved):
            self._latest = None
        self._staged_inputs.upload(call.inputs)
        if self._latest is not call:
            self._activate(call)
            self._set_addresses(call)
        if not self._context.execute_async_v3(self._cuda.stream):
            self._latest = None
            raise self._failure("the engine cannot be run")
        self._staged_outputs.download(call.outputs)

    def _activate(self, call: "_EngineCall") -> None:
        """Chooses the profile, which forgets all shapes, and sets them."""
        self._latest = None
        context, stream = self._context, self._cuda.stream
        if context.active_optimization_profile != call.profile and not context.set_optimization_profile_async(
            call.profile, stream
        ):
            raise self._failure(f"profile {self._profiles[call.profile]} cannot be chosen")
        for name, shape in call.shapes.items():
            if not context.set_input_shape(name, shape):
                raise self._failure(f"{name} cannot have shape {list(shape)}")

    def _set_addresses(self, call: "_EngineCall") -> None:
        addresses = {
            **{name: array.address for name, array in call.resident.items()},
            **self._staged_inputs.addresses(call.inputs),
            **self._staged_outputs.addresses(call.outputs),
        }
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise self._failure(f"{name} cannot be bound to device memory")
        self._latest = call

    def _failure(self, what: str) -> ProviderError:
        """An error with what the library has said of it."""
        said = " ".join(self._errors) or "TensorRT does not say why"
        self._errors.clear()
        return ProviderError(f"{self._name}: {what}: {said}")


@dataclass
class _Layout:
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


@dataclass(eq=False)
class _EngineCall:
    """A bound call; see ``Call``."""

    execute: Callable[["_EngineCall"], None]
    profile: int
    shapes: Mapping[str, tuple[int, ...]]
    resident: dict[str, CudaArray] = field(default_factory=dict)
    inputs: _Layout = field(default_factory=_Layout)
    outputs: _Layout = field(default_factory=_Layout)

    def place(self, name: str, array: Buffer, layout: _Layout) -> None:
        """Leaves a device array where it is, and makes room for a host array."""
        if isinstance(array, CudaArray):
            self.resident[name] = array
        else:
            layout.add_copied(name, host_array(array))

    def run(self) -> None:
        """Copies in, computes, copies out and waits."""
        self.execute(self)


class _Staging:
    """A block of page-locked host memory and one of the device, which all calls of a session use in turn."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._pinned = cuda.pinned(ALIGNMENT)
        self._device = cuda.zeros((ALIGNMENT,), np.uint8)

    def reserve(self, nbytes: int) -> bool:
        """Makes room; returns whether the blocks are others now."""
        if nbytes <= self._device.nbytes:
            return False
        self._pinned = self._cuda.pinned(nbytes)
        self._device = self._cuda.zeros((nbytes,), np.uint8)
        return True

    def addresses(self, layout: _Layout) -> dict[str, int]:
        """Where each tensor lies on the device."""
        return {name: self._device.address + offset for name, offset in layout.offsets.items()}

    def upload(self, layout: _Layout) -> None:
        """Begins to copy the host arrays to the device."""
        for name, array in layout.arrays.items():
            self._part(layout, name)[:] = array.reshape(-1).view(np.uint8)
        if layout.copied:
            self._cuda.upload(self._device.address, self._pinned, layout.copied)

    def download(self, layout: _Layout) -> None:
        """Copies from the device to the host arrays, when all before it is done."""
        if layout.copied:
            self._cuda.download(self._pinned, self._device.address, layout.copied)
        self._cuda.synchronize()
        for name, array in layout.arrays.items():
            array.reshape(-1).view(np.uint8)[:] = self._part(layout, name)

    def _part(self, layout: _Layout, name: str) -> NDArray[np.uint8]:
        first = layout.offsets[name]
        return self._pinned[first : first + layout.arrays[name].nbytes]
