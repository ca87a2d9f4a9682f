"""TensorRT engines: for the GPU they were built on, and for RTX GPUs."""

from dataclasses import dataclass
from pathlib import Path

from dspark.providers.cuda.graph import ENABLE_CUDA_GRAPH, wants_cuda_graphs
from dspark.providers.cuda.memory import Cuda
from dspark.providers.errors import ProviderError
from dspark.providers.monitors import NvidiaMonitor
from dspark.providers.provider import (
    DEFAULT_LOADING,
    NOTHING,
    CompileOptions,
    Discovery,
    LoadOptions,
    Options,
    Provider,
)
from dspark.providers.session import Session
from dspark.providers.tensorrt.engine import TENSORRT_BACKEND, TENSORRT_RTX_BACKEND, Backend, build_engine
from dspark.providers.tensorrt.session import TensorRtSession

__all__ = ["TENSORRT", "TENSORRT_RTX"]


@dataclass(frozen=True, kw_only=True)
class TensorRtProvider(Provider):
    """Engines that ``dspark-export --compile`` wrote into the bundle.

    Attributes:
        backend: The library.
    """

    backend: Backend
    compiled_tables: frozenset[str] | None = frozenset({"fp32", "fp16", "bf16"})
    compiles_ranges: bool = True
    compiles_fixed_cache: bool = True  # TensorRT's KV_CACHE_UPDATE wants it

    def discover(self) -> Discovery:
        """Looks for the library and a GPU; never raises."""
        try:
            self.backend.load()
            return Discovery((self.backend.device()[1],))
        except ProviderError as error:
            return Discovery(problem=str(error))

    def device_name(self, options: Options = NOTHING) -> str | None:
        """Name of the GPU that engines run on, whatever they were built for."""
        try:
            return Cuda().device_name()
        except ProviderError:  # no GPU: loading an engine tells
            return None

    def open(self, model: Path, how: LoadOptions = DEFAULT_LOADING) -> Session:
        """Loads the engine of a graph; it needs no host threads, and nothing of it runs on the host."""
        self.check_options(how.options)
        return TensorRtSession(self.backend, model, cuda_graphs=wants_cuda_graphs(how.options))

    def require_compiler(self, options: Options = NOTHING) -> None:
        """Needs the library, and a GPU if it builds for the one that is there."""
        self.check_options(options)
        self.backend.load()
        self.backend.device()

    def compile(self, model: Path, how: CompileOptions) -> str:
        """Builds the engine of a graph; see ``Provider.compile``."""
        key = build_engine(self.backend, model, how)
        profiles = ", ".join(key.profiles)
        return f"{key.device} with {key.backend} {key.version}: {key.layers:,} layers, profiles {profiles}"


PRECISIONS = frozenset({"fp32", "fp16", "bf16", "int8-weights"})

TENSORRT = TensorRtProvider(
    name="tensorrt",
    aliases=("trt",),
    precisions=PRECISIONS,
    options=frozenset({ENABLE_CUDA_GRAPH}),
    install="pip install 'dspark-onnx[tensorrt]' on a host with an NVIDIA driver",
    monitor=NvidiaMonitor(),
    backend=TENSORRT_BACKEND,
)
TENSORRT_RTX = TensorRtProvider(
    name="tensorrt-rtx",
    aliases=("trt-rtx",),
    precisions=PRECISIONS,
    options=frozenset({ENABLE_CUDA_GRAPH}),
    install="pip install 'dspark-onnx[tensorrt-rtx]' on a host with an RTX GPU",
    monitor=NvidiaMonitor(),
    backend=TENSORRT_RTX_BACKEND,
)
