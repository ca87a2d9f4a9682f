"""ONNX Runtime's CUDA provider: what the host does not look at stays on the device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from dspark.providers.cuda_memory import Cuda, CudaArray, host_array
from dspark.providers.errors import ProviderError
from dspark.providers.onnxruntime_session import OnnxRuntimeSession
from dspark.providers.provider import Provider
from dspark.providers.session import Buffer, Call, Session

__all__ = ["CUDA", "CudaSession"]


class CudaSession(OnnxRuntimeSession):
    """A graph in an ONNX Runtime session on a GPU; see ``DeviceSession``.

    ONNX Runtime copies host inputs to the device when they are *bound*, so these are bound again at every run.

    Args:
        model: The graph's file.
        threads: See ``OnnxRuntimeSession``.
        provider: Name of the execution provider in ONNX Runtime.
        memory: ONNX Runtime's name of the memory that device arrays lie in.

    Raises:
        ProviderError: ONNX Runtime or cuda-python is not installed, or there is no GPU that it can use.
    """

    def __init__(
        self, model: Path, threads: int | None, *, provider: str = "CUDAExecutionProvider", memory: str = "cuda"
    ) -> None:
        super().__init__(model, provider, threads)
        if provider not in self._session.get_providers():  # ONNX Runtime took the CPU without an error
            raise ProviderError(f"{model}: {provider} cannot be used; look after the GPU's driver and CUDA's libraries")
        self.cache_capacity: int | None = None
        self._memory = memory
        self._cuda = Cuda()

    def device_array(self, shape: tuple[int, ...], dtype: DTypeLike) -> CudaArray:
        """Allocates an array of zeros on the device."""
        return self._cuda.zeros(shape, dtype)

    def bind(self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> Call:
        """Binds every input and the wanted outputs; see ``DeviceSession``."""
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
            raise ProviderError(f"{self._model}: {name} cannot be bound: {' '.join(str(error).split())}") from error


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
            message = " ".join(str(error).split())
            raise ProviderError(f"{self.model}: the graph cannot be run: {message}") from error


@dataclass(frozen=True)
class CudaProvider(Provider):
    """NVIDIA GPUs through ONNX Runtime's own kernels."""

    def open(self, model: Path, *, threads: int | None) -> Session:
        """Loads a graph on the CUDA provider."""
        return CudaSession(model, threads)


CUDA = CudaProvider("cuda", ("CUDAExecutionProvider",), frozenset({"fp32", "fp16", "bf16", "int4"}))
