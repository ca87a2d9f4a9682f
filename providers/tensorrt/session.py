"""Sessions that run TensorRT engines on one CUDA stream."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dspark.providers.cuda.graph import CAPTURED_AFTER, CudaGraph
from dspark.providers.cuda.memory import Cuda, CudaArray
from dspark.providers.cuda.staging import ALIGNMENT, BoundArrays, Staging
from dspark.providers.errors import ProviderError
from dspark.providers.session import Buffers, Call
from dspark.providers.tensorrt.engine import Backend, open_engine

__all__ = ["TensorRtSession"]

logger = logging.getLogger(__name__)


class TensorRtSession:
    """A graph's engine; see ``DeviceSession``.

    Host arrays travel through page-locked memory, all inputs in one copy and all outputs in another. Arrays on
    the device are not copied. Profile, shapes and addresses are set again only if another call ran in between.

    Args:
        backend: The library.
        graph: The graph's file, beside which the engine lies.
        cuda_graphs: Whether calls that repeat become CUDA graphs.

    Raises:
        ProviderError: See ``open_engine``; or the device's memory is full.
    """

    def __init__(self, backend: Backend, graph: Path, *, cuda_graphs: bool = False) -> None:
        trt = backend.load()
        opened = open_engine(backend, graph)
        self._engine, self._errors = opened.native, opened.errors
        self._name = f"{graph.stem} ({backend.name})"
        self._profiles = tuple(opened.key.profiles)
        self.limits = opened.key.limits
        self._cuda = Cuda()
        self._captures = cuda_graphs and not backend.portable
        self._user_managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._activations: CudaArray | None = None
        if cuda_graphs and backend.portable:  # captures by itself, when kernels for a shape are ready
            config = self._engine.create_runtime_config()
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            self._context = self._engine.create_execution_context(config)
        else:
            self._context = self._engine.create_execution_context()
        if self._context is None:
            raise self._failure("the engine cannot be prepared")
        self._staging = Staging(self._cuda)
        self._latest: tuple[_EngineCall, int] | None = None
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

    def bind(self, inputs: Buffers, outputs: Buffers) -> Call:
        """Binds every input and the wanted outputs; see ``DeviceSession``."""
        self._check_names(inputs, outputs)
        self._check_aliases(inputs, outputs)
        shapes = {name: tuple(array.shape) for name, array in inputs.items()}
        call = _EngineCall(self._run, self._choose_profile(shapes), shapes)
        self._latest = None
        self._set_shapes(self._context, call)
        for name in self._inputs:
            call.arrays.place(name, inputs[name], call.arrays.inputs)
        for name in sorted(self._outputs, key=lambda name: name not in outputs):  # the wanted ones are copied as one
            shape, dtype = tuple(self._context.get_tensor_shape(name)), self._types[name]
            array = outputs.get(name)
            if array is not None and tuple(array.shape) != shape:
                raise ProviderError(
                    f"{self._name}: {name} is bound to shape {list(array.shape)}; the engine computes {list(shape)}"
                )
            if array is None:
                call.arrays.outputs.add(name, math.prod(shape) * dtype.itemsize)
            else:
                call.arrays.place(name, array, call.arrays.outputs)
        return call

    def _check_names(self, inputs: Buffers, outputs: Buffers) -> None:
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

    def _check_aliases(self, inputs: Buffers, outputs: Buffers) -> None:
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
        self._staging.upload(call.arrays)
        replay = self._replay(call) if self._captures else None
        if replay is None:
            self._execute(call)
        else:
            replay.graph.launch()
        self._staging.download(call.arrays)

    def _execute(self, call: "_EngineCall") -> None:
        if self._latest != (call, self._staging.moves):
            self._latest = None
            self._set_shapes(self._context, call)
            self._set_addresses(self._context, call)
            self._latest = call, self._staging.moves
        if not self._context.execute_async_v3(self._cuda.stream):
            self._latest = None
            raise self._failure("the engine cannot be run")

    def _replay(self, call: "_EngineCall") -> "_Replay | None":
        """The call's graph, captured when it has run a few times and when its addresses have changed since."""
        call.runs += 1
        if call.runs > CAPTURED_AFTER and (call.replay is None or call.replay.moves != self._staging.moves):
            call.replay = None
            try:
                call.replay = self._capture(call)
            except ProviderError as error:
                logger.warning("%s: runs without CUDA graphs: %s", self._name, error)
                self._captures = False
        return call.replay

    def _capture(self, call: "_EngineCall") -> "_Replay":
        """A graph belongs to the context that it was captured from, so each call gets one; they share their memory."""
        size = self._engine.device_memory_size_v2
        if self._activations is None:
            self._activations = self._cuda.zeros((size,), np.uint8)
        context = self._engine.create_execution_context(self._user_managed)
        if context is None:
            raise self._failure("the engine cannot be prepared")
        context.set_device_memory(self._activations.address, size)
        self._set_shapes(context, call)
        self._set_addresses(context, call)

        def enqueue() -> None:
            if not context.execute_async_v3(self._cuda.stream):
                raise self._failure("the engine cannot be run")

        enqueue()  # work that TensorRT puts off until shapes are used must not be captured
        return _Replay(CudaGraph(self._cuda, enqueue), context, self._staging.moves)

    def _set_shapes(self, context: Any, call: "_EngineCall") -> None:
        """Chooses the profile, which forgets all shapes, and sets them."""
        stream = self._cuda.stream
        if context.active_optimization_profile != call.profile and not context.set_optimization_profile_async(
            call.profile, stream
        ):
            raise self._failure(f"profile {self._profiles[call.profile]} cannot be chosen")
        for name, shape in call.shapes.items():
            if not context.set_input_shape(name, shape):
                raise self._failure(f"{name} cannot have shape {list(shape)}")

    def _set_addresses(self, context: Any, call: "_EngineCall") -> None:
        for name, address in self._staging.addresses(call.arrays).items():
            if not context.set_tensor_address(name, address):
                raise self._failure(f"{name} cannot be bound to device memory")

    def _failure(self, what: str) -> ProviderError:
        """An error with what the library has said of it."""
        said = " ".join(self._errors) or "TensorRT does not say why"
        self._errors.clear()
        return ProviderError(f"{self._name}: {what}: {said}")


@dataclass(eq=False)
class _EngineCall:
    """A bound call; see ``Call``.

    Attributes:
        execute: Runs it.
        profile: Index of its profile.
        shapes: Of its inputs.
        arrays: What it is bound to.
        runs: How often it has run.
        replay: Its CUDA graph.
    """

    execute: Callable[["_EngineCall"], None]
    profile: int
    shapes: Mapping[str, tuple[int, ...]]
    arrays: BoundArrays = field(default_factory=BoundArrays)
    runs: int = 0
    replay: "_Replay | None" = None

    def run(self) -> None:
        """Copies in, computes, copies out and waits."""
        self.execute(self)


@dataclass(frozen=True)
class _Replay:
    """A captured call.

    Attributes:
        graph: Its graph.
        context: What it was captured from, which must live as long and not change.
        moves: Of the staging memory whose addresses were captured.
    """

    graph: CudaGraph
    context: Any
    moves: int
