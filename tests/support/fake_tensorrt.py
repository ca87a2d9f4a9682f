"""The part of TensorRT that the project uses, over ``fake_cuda``, with a small engine that really computes.

The engine takes ``x [B, T]`` float32, ``row [B]`` int64 and ``past [B, S]`` float32. It returns ``y = 2 x + Σ past``,
``count = row + 1`` and ``present``: ``past`` with ``x[b, 0]`` at ``row[b]``, which may have to be written in place.
"""

import ctypes
import sys
from collections.abc import Mapping
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.fake_cuda import FakeCuda

__all__ = ["PROFILES", "FakeEngine", "FakeTensorRt", "install"]

Shape = tuple[int, ...]
INPUTS: Mapping[str, tuple[str, ...]] = {"x": ("B", "T"), "row": ("B",), "past": ("B", "S")}
OUTPUTS: Mapping[str, tuple[str, ...]] = {"y": ("B", "T"), "count": ("B",), "present": ("B", "S")}
PROFILES: Mapping[str, Mapping[str, tuple[int, int, int]]] = {
    "decode": {"B": (1, 1, 4), "T": (1, 1, 1), "S": (1, 8, 16)},
    "prefill": {"B": (1, 1, 1), "T": (1, 8, 32), "S": (1, 8, 16)},
}


class Mode(IntEnum):
    INPUT = 1
    OUTPUT = 2


class FakeEngine:
    def __init__(self, cuda: FakeCuda, *, in_place: bool) -> None:
        self.cuda = cuda
        self.in_place = in_place
        self.contexts: list[FakeContext] = []
        self.names = [*OUTPUTS, *INPUTS]
        self.num_io_tensors = len(self.names)
        self.device_memory_size_v2 = 4096

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name in INPUTS else Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> str:
        return "INT64" if name in ("row", "count") else "FLOAT"

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[Shape]:
        ranges = list(PROFILES.values())[profile]
        return [tuple(ranges[symbol][which] for symbol in INPUTS[name]) for which in range(3)]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return "past" if self.in_place and name == "present" else None

    def create_runtime_config(self) -> Any:
        return SimpleNamespace(cuda_graph_strategy="DISABLED")

    def create_execution_context(self, how: Any = "STATIC") -> "FakeContext":
        self.contexts.append(FakeContext(self, how))
        return self.contexts[-1]


class FakeContext:
    """Checks what a real context trusts its caller with.

    Attributes:
        settled: Whether it has run since its shapes were set, after which runs can be captured.
        captured: Whether one was, after which nothing of it may change.
    """

    def __init__(self, engine: FakeEngine, how: Any) -> None:
        self.engine = engine
        self.how = how
        self.memory: tuple[int, int] | None = None
        self.settled = self.captured = False
        self.active_optimization_profile = 0
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}

    def set_device_memory(self, address: int, nbytes: int) -> None:
        assert self.how == "USER_MANAGED"
        assert address % 256 == 0
        assert nbytes >= self.engine.device_memory_size_v2
        self.memory = address, nbytes

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert not self.captured
        self.engine.cuda.enqueue(stream, lambda: None, "profile", profile)
        self.active_optimization_profile = profile
        self.shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        assert not self.captured
        self.engine.cuda.events.append(("shape", name, shape))
        self.shapes[name] = shape
        self.settled = False
        low, _, high = self.engine.get_tensor_profile_shape(name, self.active_optimization_profile)
        return all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def get_tensor_shape(self, name: str) -> Shape:
        sizes: dict[str, int] = {}
        for each, symbols in INPUTS.items():
            sizes.update(zip(symbols, self.shapes[each], strict=True))
        return tuple(sizes[symbol] for symbol in (INPUTS | OUTPUTS)[name])  # type: ignore[operator]

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert not self.captured
        self.engine.cuda.events.append(("address", name))
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        if self.how == "USER_MANAGED":
            assert self.memory is not None
            assert self.engine.cuda.within(*self.memory, self.engine.cuda.device)
        if self.engine.cuda.capturing is None:
            assert not self.captured
            self.settled = True
        else:
            assert self.settled, "what TensorRT puts off would be captured"
            self.captured = True
        tensors = {}
        for name in self.engine.names:
            shape, dtype = self.get_tensor_shape(name), np.dtype(nptype(self.engine.get_tensor_dtype(name)))
            address, nbytes = self.addresses[name], int(np.prod(shape)) * dtype.itemsize
            assert address % 256 == 0, f"{name} is not aligned"
            assert self.engine.cuda.within(address, nbytes, self.engine.cuda.device), f"{name} is not on the device"
            memory = (ctypes.c_uint8 * nbytes).from_address(address)
            tensors[name] = np.frombuffer(memory, dtype).reshape(shape)
        if self.engine.in_place:
            assert self.addresses["present"] == self.addresses["past"]
        self.engine.cuda.enqueue(stream, lambda: _compute(**tensors), "execute")
        return True


def _compute(x: Any, row: Any, past: Any, y: Any, count: Any, present: Any) -> None:
    y[:] = 2 * x + past.sum(axis=1, keepdims=True)
    count[:] = row + 1
    written = past.copy()
    written[np.arange(len(row)), row] = x[:, 0]
    present[:] = written


def nptype(name: str) -> type:
    return {"INT64": np.int64, "FLOAT": np.float32}[name]


class FakeBuilder:
    """Writes down what it is asked for."""

    def __init__(self, module: "FakeTensorRt") -> None:
        self.module = module

    def create_network(self, flags: int) -> Any:
        self.module.flags = flags
        tensors = [
            SimpleNamespace(name=name, shape=(-1,) * len(symbols), get_dimension_name=symbols.__getitem__)
            for name, symbols in INPUTS.items()
        ]
        return SimpleNamespace(num_inputs=len(tensors), num_layers=3, get_input=tensors.__getitem__)

    def create_builder_config(self) -> Any:
        def set_timing_cache(cache: bytes, ignore_mismatch: bool) -> bool:
            self.module.timings.append(cache)
            return cache in (b"", b"timings")

        return SimpleNamespace(
            add_optimization_profile=self.module.profiles.append,
            create_timing_cache=lambda content: content,
            set_timing_cache=set_timing_cache,
            get_timing_cache=lambda: SimpleNamespace(serialize=lambda: b"timings"),
        )

    def create_optimization_profile(self) -> Any:
        shapes: dict[str, tuple[Shape, Shape, Shape]] = {}
        return SimpleNamespace(shapes=shapes, set_shape=lambda name, *three: shapes.update({name: three}))

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
        config.progress_monitor.phase_start("Building engine", None, 2)
        for step in range(2):
            if self.module.interrupt:
                self.module.interrupt()
            if not config.progress_monitor.step_complete("Building engine", step):
                self.module.cancelled = True
                return None
        if self.module.build_problem:
            self.module.log.log("ERROR", self.module.build_problem)
            self.module.log.log("WARNING", "never mind")
            return None
        return b"engine"


class FakeTensorRt:
    """Stands for the module ``tensorrt``."""

    __version__ = "11.4.0"
    TensorIOMode = Mode
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="USER_MANAGED")
    CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE="WHOLE_GRAPH_CAPTURE")
    nptype = staticmethod(nptype)

    class ILogger:
        ERROR, INTERNAL_ERROR = "ERROR", "INTERNAL_ERROR"

        def __init__(self) -> None:
            """As the real one, which must be called."""

    class IProgressMonitor:
        def __init__(self) -> None:
            """As the real one, which must be called."""

    def __init__(self, cuda: FakeCuda, *, in_place: bool) -> None:
        self.engine: FakeEngine | None = FakeEngine(cuda, in_place=in_place)
        self.flags = 0
        self.profiles: list[Any] = []
        self.timings: list[bytes] = []
        self.parse_problem = self.build_problem = ""
        self.interrupt: Any = None
        self.cancelled = False
        self.log: Any = None

    def Builder(self, log: Any) -> FakeBuilder:  # noqa: N802
        self.log = log
        return FakeBuilder(self)

    def OnnxParser(self, network: Any, log: Any) -> Any:  # noqa: N802
        return SimpleNamespace(
            parse=lambda content, path: not self.parse_problem,
            num_errors=1,
            get_error=lambda index: SimpleNamespace(desc=lambda: self.parse_problem),
        )

    def Runtime(self, log: Any) -> Any:  # noqa: N802
        def deserialize_cuda_engine(content: bytes) -> FakeEngine | None:
            if content != b"engine":
                log.log("ERROR", "bad magic\nnumber")
                return None
            self.log = log
            return self.engine

        return SimpleNamespace(deserialize_cuda_engine=deserialize_cuda_engine)


def install(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, *, in_place: bool = False) -> FakeTensorRt:
    """Makes the fake the module that providers import."""
    fake = FakeTensorRt(cuda, in_place=in_place)
    for module in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, module, fake)
    return fake
