"""ONNX Runtime's CUDA provider: what the host does not look at stays on the device.

Source: onnxruntime.ai, "NVIDIA - CUDA".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import DTypeLike

from dspark.providers.cuda_memory import Cuda, CudaArray, host_array
from dspark.providers.device_load import NvidiaMonitor
from dspark.providers.errors import ProviderError, one_line
from dspark.providers.onnxruntime_provider import OnnxRuntimeProvider
from dspark.providers.onnxruntime_session import OnnxRuntimeSession
from dspark.providers.provider import NOTHING
from dspark.providers.session import Buffer, Call

__all__ = ["CUDA", "SHAPE_OPERATORS", "CudaSession"]


class CudaSession(OnnxRuntimeSession):
    """A graph in an ONNX Runtime session on a GPU; see ``DeviceSession``.

    ONNX Runtime copies host inputs to the device when they are *bound*, so these are bound again at every run.

    Args:
        model: The graph's file.
        session: The ``onnxruntime.InferenceSession``.
        memory: ONNX Runtime's name of the memory that device arrays lie in.
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
        folder: "TemporaryDirectory[str] | None" = None,
    ) -> None:
        super().__init__(model, session, folder)
        self.cache_capacity: int | None = None
        self._memory = memory
        self._cuda = Cuda()

    def device_array(self, shape: tuple[int, ...], dtype: DTypeLike) -> CudaArray:
        """Allocates an array of zeros on the device."""
        return self._cuda.zeros(shape, dtype)

    def bind(self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> Call:
        """Binds every input and the wanted outputs; see ``DeviceSession``."""
        self._check(inputs, outputs)
        binding = self._session.io_binding()
        host = {name: array for name, array in inputs.items() if not isinstance(array, CudaArray)}

        def bind_inputs(arrays: Mapping[str, Buffer]) -> None:
            for name, array in arrays.items():
                self._bind_one(binding.bind_input, name, array)

        bind_inputs(inputs)
        for name, array in outputs.items():
            self._bind_one(binding.bind_output, name, array)
        kept = [*inputs.values(), *outputs.values()]  # the binding holds addresses, not references
        return _CudaCall(self._model, self._session, binding, lambda: bind_inputs(host), kept)

    def _bind_one(self, bind: Callable[..., None], name: str, array: Buffer) -> None:
        if isinstance(array, CudaArray):
            if not array.contiguous:
                raise ProviderError(f"{self._model}: {name} is bound to an array with gaps")
            place, address = self._memory, array.address
        else:
            place, address = "cpu", host_array(array).ctypes.data
        try:
            bind(name, place, 0, array.dtype.type, array.shape, address)
        except Exception as error:  # the binding raises its own classes, which share no public base
            raise ProviderError(f"{self._model}: {name} cannot be bound: {one_line(error)}") from error


@dataclass(frozen=True)
class _CudaCall:
    """A bound call; see ``Call``."""

    model: Path
    session: Any
    binding: Any
    bind_host_inputs: Callable[[], None]
    kept: list[Buffer]

    def run(self) -> None:
        self.bind_host_inputs()
        try:
            self.binding.synchronize_inputs()
            self.session.run_with_iobinding(self.binding)
            self.binding.synchronize_outputs()
        except Exception as error:
            raise ProviderError(f"{self.model}: the graph cannot be run: {one_line(error)}") from error


SHAPE_OPERATORS = frozenset({"Shape", "Size", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Range"})
"""What shapes are computed with: ONNX Runtime keeps these on the host beside providers that run kernel by kernel."""


@dataclass(frozen=True, kw_only=True)
class CudaProvider(OnnxRuntimeProvider):
    """NVIDIA GPUs through ONNX Runtime's own kernels."""

    def wrap(self, model: Path, session: Any, folder: "TemporaryDirectory[str] | None") -> CudaSession:
        """A session whose arrays may lie on the GPU."""
        return CudaSession(model, session, folder=folder)

    def device_name(self, options: Mapping[str, str] = NOTHING) -> str | None:
        """Name of the GPU as CUDA numbers them, which environment variables change."""
        try:
            return Cuda().device_name(int(options.get("device_id", "0")))
        except (ProviderError, ValueError):  # no GPU, or no number: loading a graph tells
            return None


CUDA = CudaProvider(
    name="cuda",
    aliases=("CUDAExecutionProvider", "nvidia"),
    execution_provider="CUDAExecutionProvider",
    precisions=frozenset({"fp32", "fp16", "bf16", "int8-blocks", "int8-weights", "int4"}),
    host_operators=SHAPE_OPERATORS,
    options=frozenset(
        {
            "arena_extend_strategy",
            "cudnn_conv_algo_search",
            "device_id",
            "do_copy_in_default_stream",
            "enable_cuda_graph",
            "gpu_mem_limit",
            "prefer_nhwc",
            "sdpa_kernel",
            "tunable_op_enable",
            "tunable_op_tuning_enable",
            "use_ep_level_unified_stream",
            "use_tf32",
            "user_compute_stream",
        }
    ),
    # TensorFloat-32 rounds float32 products to ten bits, which would not be the model's output any more.
    defaults=(("use_tf32", "0"),),
    install="pip install 'dspark-onnx[cuda]' on a host with an NVIDIA driver",
    monitor=NvidiaMonitor(),
)
