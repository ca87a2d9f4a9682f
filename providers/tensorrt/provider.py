"""TensorRT engines: for the GPU they were built on, and for RTX GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dspark.providers.cuda.graph import OPTION, wants_graphs
from dspark.providers.cuda.memory import Cuda
from dspark.providers.errors import ProviderError
from dspark.providers.monitors import NvidiaMonitor
from dspark.providers.provider import DEFAULT_LOADING, NOTHING, Discovery, LoadOptions, Provider
from dspark.providers.session import Session
from dspark.providers.tensorrt.engine import TENSORRT, TENSORRT_RTX, Backend
from dspark.providers.tensorrt.session import TensorRtSession

__all__ = ["TENSORRT_PROVIDER", "TENSORRT_RTX_PROVIDER"]


@dataclass(frozen=True, kw_only=True)
class TensorRtProvider(Provider):
    """Engines that ``dspark-export --compile`` wrote into the bundle.

    Attributes:
        backend: The library.
    """

    backend: Backend

    def discover(self) -> Discovery:
        """Looks for the library and a GPU; never raises."""
        try:
            self.backend.load()
            return Discovery((self.backend.device()[1],))
        except ProviderError as error:
            return Discovery(problem=str(error))

    def device_name(self, options: Mapping[str, str] = NOTHING) -> str | None:
        """Name of the GPU that engines run on, whatever they were built for."""
        try:
            return Cuda().device_name()
        except ProviderError:  # no GPU: loading an engine tells
            return None

    def open(self, model: Path, how: LoadOptions = DEFAULT_LOADING) -> Session:
        """Loads the engine of a graph; it needs no host threads, and nothing of it runs on the host."""
        self.check_options(how.options)
        return TensorRtSession(self.backend, model, graphs=wants_graphs(how.options))

    def require_compiler(self, options: Mapping[str, str] = NOTHING) -> None:
        """Needs the library, and a GPU if it builds for the one that is there."""
        self.check_options(options)
        self.backend.load()
        self.backend.device()


PRECISIONS = frozenset({"fp32", "fp16", "bf16", "int8-weights"})

TENSORRT_PROVIDER = TensorRtProvider(
    name="tensorrt",
    aliases=("trt",),
    precisions=PRECISIONS,
    options=frozenset({OPTION}),
    install="pip install 'dspark-onnx[tensorrt]' on a host with an NVIDIA driver",
    monitor=NvidiaMonitor(),
    backend=TENSORRT,
)
TENSORRT_RTX_PROVIDER = TensorRtProvider(
    name="tensorrt-rtx",
    aliases=("trt-rtx",),
    precisions=PRECISIONS,
    options=frozenset({OPTION}),
    install="pip install 'dspark-onnx[tensorrt-rtx]' on a host with an RTX GPU",
    monitor=NvidiaMonitor(),
    backend=TENSORRT_RTX,
)
