"""ONNX Runtime's sessions on NVIDIA GPUs: results that the host does not look at stay on the device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from typing import Any

from numpy.typing import DTypeLike

from dspark.providers.cuda.graph import CAPTURED_AFTER
from dspark.providers.cuda.memory import Cuda, CudaArray
from dspark.providers.cuda.staging import BoundArrays, Staging
from dspark.providers.errors import ProviderError
from dspark.providers.onnxruntime.library import import_onnxruntime
from dspark.providers.onnxruntime.session import OnnxRuntimeSession
from dspark.providers.session import Buffers, Call, SessionLimits

__all__ = ["CudaSession"]

MOST_GRAPHS = 128
"""Calls that a session captures: ONNX Runtime forgets none."""
NO_GRAPH = -1
"""The number of runs without a graph."""


class CudaSession(OnnxRuntimeSession):
    """A graph in an ONNX Runtime session on a GPU; see ``DeviceSession``.

    Host arrays travel through page-locked memory, all inputs in one copy and all outputs in another, so that a graph
    finds them at the same device addresses in every run.

    With CUDA graphs a call that has run a few times gets a number, under which ONNX Runtime captures its next run and
    repeats it from then on, whatever is bound. So a call whose addresses have changed gets another number.

    Args:
        model: The graph's file.
        session: The ``onnxruntime.InferenceSession``.
        memory: ONNX Runtime's name of the memory that device arrays lie in.
        cuda_graphs: Whether the session was made with CUDA graphs.
        folder: See ``OnnxRuntimeSession``.

    Raises:
        ProviderError: cuda-python is not installed, or there is no GPU that it can use.
    """

    def __init__(
        self,
        model: Path,
        session: Any,
        *,
        memory: str = "cuda",
        cuda_graphs: bool = False,
        folder: "TemporaryDirectory[str] | None" = None,
    ) -> None:
        super().__init__(model, session, folder)
        self.limits = SessionLimits()
        self._memory = memory
        self._cuda = Cuda()
        self._staging = Staging(self._cuda)
        self._numbers = iter(range(1, 1 + MOST_GRAPHS)) if cuda_graphs else None
        self._capturer: int | None = None

    def device_array(self, shape: tuple[int, ...], dtype: DTypeLike) -> CudaArray:
        """Allocates an array of zeros on the device."""
        return self._cuda.zeros(shape, dtype)

    def bind(self, inputs: Buffers, outputs: Buffers) -> Call:
        """Binds every input and the wanted outputs; see ``DeviceSession``."""
        self._check(inputs, outputs)
        call = _CudaCall(self._run, self._session.io_binding(), inputs, outputs)
        for name, array in {**inputs, **outputs}.items():
            if isinstance(array, CudaArray) and not array.contiguous:
                raise ProviderError(f"{self._model}: {name} is bound to an array with gaps")
            call.arrays.place(name, array, call.arrays.inputs if name in inputs else call.arrays.outputs)
        self._staging.reserve(call.arrays)
        self._bind(call)
        return call

    def _bind(self, call: "_CudaCall") -> None:
        addresses = self._staging.addresses(call.arrays)
        for name, array in call.inputs.items():
            self._bind_one(call.binding.bind_input, name, array, addresses[name], self._memory)
        for name, array in call.outputs.items():
            self._bind_one(call.binding.bind_output, name, array, addresses[name], self._memory)
        call.moves, call.options = self._staging.moves, None

    def _run(self, call: "_CudaCall") -> None:
        self._staging.upload(call.arrays)
        if call.moves != self._staging.moves:
            self._bind(call)
        self._cuda.synchronize()  # ONNX Runtime has a stream of its own, for which it waits
        self._run_binding(call.binding, self._options(call))
        self._staging.download(call.arrays)

    def _options(self, call: "_CudaCall") -> Any:
        """Options of the call's next run: the number of its graph. Only one thread may use graphs."""
        if self._numbers is None:
            return None
        call.runs += 1
        if self._capturer is None:
            self._capturer = get_ident()
        if call.runs <= CAPTURED_AFTER or get_ident() != self._capturer:
            return _run_options(NO_GRAPH)
        if call.options is None:
            call.options = _run_options(next(self._numbers, NO_GRAPH))
        return call.options


@dataclass(eq=False)
class _CudaCall:
    """A bound call; see ``Call``.

    Attributes:
        execute: Runs it.
        binding: ONNX Runtime's.
        inputs: What it is bound to.
        outputs: The same.
        arrays: Where these lie.
        moves: Of the staging memory whose addresses are bound.
        runs: How often it has run.
        options: Of a run as a CUDA graph.
    """

    execute: Callable[["_CudaCall"], None]
    binding: Any
    inputs: Buffers
    outputs: Buffers
    arrays: BoundArrays = field(default_factory=BoundArrays)
    moves: int = 0
    runs: int = 0
    options: Any = None

    def run(self) -> None:
        """Copies in, computes, copies out and waits."""
        self.execute(self)


def _run_options(number: int) -> Any:
    options = import_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options
