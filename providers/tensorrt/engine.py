"""Builds TensorRT engines ahead of time, with a key that says where each may run.

TensorRT and TensorRT for RTX have one interface. TensorRT chooses kernels by timing them, so it needs the GPU that the
engine is for, and keeps the timings. TensorRT for RTX builds without a GPU, for every RTX GPU since Ampere, and
finishes kernels when they first run. Networks are strongly typed: the types of the graph are those of the engine.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dspark.providers.cuda.memory import Cuda
from dspark.providers.engine_key import ENGINES, EngineKey, graph_hash
from dspark.providers.errors import ProviderError, one_line
from dspark.providers.tensorrt.profiles import Dimensions, Limits, Profile, profiles

__all__ = ["TENSORRT", "TENSORRT_RTX", "Backend", "Engine", "build_engine", "open_engine"]

TIMING_CACHE = "timing.cache"


@dataclass(frozen=True)
class Backend:
    """One of the two libraries.

    Attributes:
        name: What users write.
        module: Its Python package.
        portable: Whether engines are built without a GPU and run on many.
    """

    name: str
    module: str
    portable: bool

    def load(self) -> Any:
        """Imports it.

        Raises:
            ProviderError: It is not installed.
        """
        try:
            return import_module(self.module)
        except ImportError as error:
            raise ProviderError(f"{self.name} is not installed; pip install 'dspark-onnx[{self.name}]'") from error

    def device(self) -> tuple[str, str]:
        """What engines are built for: the name of their folder, and the device in words.

        Raises:
            ProviderError: A GPU is needed and there is none.
        """
        if self.portable:
            return "rtx", "any RTX GPU since Ampere"
        cuda = Cuda()
        properties = cuda.call("cudaGetDeviceProperties", cuda.call("cudaGetDevice"))
        architecture = f"sm{properties.major}{properties.minor}"
        return architecture, f"{properties.name.decode().rstrip(chr(0))} ({architecture})"


TENSORRT = Backend("tensorrt", "tensorrt", portable=False)
TENSORRT_RTX = Backend("tensorrt-rtx", "tensorrt_rtx", portable=True)


@dataclass(frozen=True)
class EngineFiles:
    """Where a graph's engine for a device lies: ``engines/<device>/`` beside the graph.

    Attributes:
        engine: The engine.
        key: Its key.
        timing_cache: Kernel timings, which the device's engines share.
    """

    engine: Path
    key: Path
    timing_cache: Path

    @classmethod
    def of(cls, graph: Path, device: str) -> "EngineFiles":
        """The files for a device's folder."""
        folder = graph.parent / ENGINES / device
        return cls(folder / f"{graph.stem}.engine", folder / f"{graph.stem}.json", folder / TIMING_CACHE)


def build_engine(
    backend: Backend,
    graph: Path,
    content: bytes,
    limits: Limits,
    precision: str,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> EngineKey:
    """Builds a graph's engine and writes it, with its key, into the bundle that the graph is in.

    Args:
        backend: The library.
        graph: The graph's file; its weights lie beside it.
        content: What is in it, or that with some dimensions fixed.
        limits: The shapes that the engine must take.
        precision: Of the graph, for the key.
        on_phase: Called with the name of every phase that begins; from other threads.

    Returns:
        The key.

    Raises:
        ProviderError: The library is missing, there is no GPU where one is needed, or the graph cannot be built.
    """
    trt = backend.load()
    folder, device = backend.device()
    files = EngineFiles.of(graph, folder)
    log = _log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(content, str(graph)):
        problems = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise ProviderError(f"{graph}: {backend.name} cannot parse the graph: {problems}")
    config = builder.create_builder_config()
    chosen = _add_profiles(builder, network, config, limits)
    config.progress_monitor = monitor = _monitor(trt, on_phase)
    files.engine.parent.mkdir(parents=True, exist_ok=True)
    if not backend.portable:
        timings = files.timing_cache.read_bytes() if files.timing_cache.is_file() else b""
        kept = config.create_timing_cache(timings)
        if kept is None or not config.set_timing_cache(kept, False):  # another version of TensorRT wrote them
            config.set_timing_cache(config.create_timing_cache(b""), False)
    with ThreadPoolExecutor(1) as pool:  # so that Ctrl-C reaches this thread
        built = pool.submit(builder.build_serialized_network, network, config)
        try:
            engine = built.result()
        except BaseException:
            monitor.cancelled = True
            raise
    if engine is None:
        raise ProviderError(f"{graph}: {backend.name} cannot build the engine: {' '.join(log.errors)}")
    files.engine.write_bytes(engine)
    if not backend.portable:
        files.timing_cache.write_bytes(config.get_timing_cache().serialize())
    ranges = {
        profile.name: {symbol: [r.low, r.best, r.high] for symbol, r in profile.ranges.items()} for profile in chosen
    }
    key = EngineKey(
        backend.name, str(trt.__version__), device, graph_hash(graph), precision, int(network.num_layers), ranges
    )
    key.write(files.key)
    return key


@dataclass(frozen=True)
class Engine:
    """A loaded engine.

    Attributes:
        key: Its key.
        native: The engine itself (``ICudaEngine``).
        errors: What the library has complained of since; grows.
    """

    key: EngineKey
    native: Any
    errors: list[str]


def open_engine(backend: Backend, graph: Path) -> Engine:
    """Loads a graph's engine for the present device.

    Args:
        backend: The library.
        graph: Where the graph's file is or was.

    Raises:
        ProviderError: There is no engine, it was built for something else, or it cannot be loaded.
    """
    trt = backend.load()
    folder, device = backend.device()
    files = EngineFiles.of(graph, folder)
    again = f"compile it with dspark-export --compile {backend.name}"
    if not files.engine.is_file() or not files.key.is_file():
        raise ProviderError(f"{files.engine}: no engine for {backend.name} here; {again}")
    key = EngineKey.read(files.key)
    here = {"backend": backend.name, "version": str(trt.__version__), "device": device}
    key.check(files.engine, here, again)
    log = _log(trt)
    engine = trt.Runtime(log).deserialize_cuda_engine(files.engine.read_bytes())
    if engine is None:
        raise ProviderError(f"{files.engine}: {backend.name} cannot load the engine: {' '.join(log.errors)}")
    return Engine(key, engine, log.errors)


def _add_profiles(builder: Any, network: Any, config: Any, limits: Limits) -> tuple[Profile, ...]:
    inputs: dict[str, Dimensions] = {}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        inputs[tensor.name] = tuple(
            tensor.get_dimension_name(axis) if size == -1 else int(size) for axis, size in enumerate(tensor.shape)
        )
    chosen = profiles(list(inputs.values()), limits)
    for profile in chosen:
        added = builder.create_optimization_profile()
        for name, dimensions in inputs.items():
            added.set_shape(name, *profile.shapes(dimensions))
        config.add_optimization_profile(added)
    return chosen


def _log(trt: Any) -> Any:
    """A logger that keeps what went wrong, for the error that is raised then."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(one_line(message))

    return Log()


def _monitor(trt: Any, on_phase: Callable[[str], None]) -> Any:
    """A progress monitor; the build ends at the next step once it is cancelled."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.cancelled = False

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            on_phase(phase)

        def phase_finish(self, phase: str) -> None:
            """Only beginnings are shown."""

        def step_complete(self, phase: str, step: int) -> bool:
            return not self.cancelled

    return Monitor()
