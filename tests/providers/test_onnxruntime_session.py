"""Sessions on devices with memory of their own: ONNX Runtime copies inputs there when they are bound, not when it runs.

Source: onnxruntime.ai, "I/O Binding"; ``IOBinding::BindInput``.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspark.providers import ProviderError
from dspark.providers.onnxruntime.session import OnnxRuntimeSession


class Doubling:
    """A session whose graph doubles ``x`` into ``y``, on the host's memory or on other."""

    def __init__(self, memory: str | None) -> None:
        self._memory = memory
        self._array: Callable[[], Any] = lambda: None
        self._output = np.zeros(0, np.float32)
        self.bound = 0
        if memory is not None:
            self.get_input_memory_infos = lambda: [SimpleNamespace(name=memory)]

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="x", shape=["N"])]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name="y", shape=["N"])]

    def io_binding(self) -> "Doubling":
        return self

    def bind_input(self, name: str, device: str, index: int, dtype: Any, shape: Any, address: int) -> None:
        if dtype is not np.float32:
            raise RuntimeError(f"Invalid type of {name}")
        self.bound += 1
        there = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), shape)
        copy = there.copy()
        self._array = lambda: there if self._memory == "Cpu" else copy

    def bind_output(self, name: str, device: str, index: int, dtype: Any, shape: Any, address: int) -> None:
        self._output = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), shape)

    def run_with_iobinding(self, binding: "Doubling", options: None) -> None:
        self._output[:] = 2 * self._array()


@pytest.mark.parametrize(("memory", "bindings"), [("Cpu", 1), ("OpenVINO_shared_CPU", 4), (None, 4)])
def test_a_run_sees_what_inputs_hold_now(memory: str | None, bindings: int) -> None:
    """Runtimes before 1.23 do not tell which memory it is."""
    session = Doubling(memory)
    x, y = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    call = OnnxRuntimeSession(Path("m.onnx"), session).bind({"x": x}, {"y": y})
    for value in (1, 2, 3):
        x[:] = value
        call.run()
        assert y.tolist() == [2 * value] * 3
    assert session.bound == bindings


def test_an_input_that_is_not_there_is_named() -> None:
    with pytest.raises(ProviderError, match=r"m\.onnx: the graph has no input z"):
        OnnxRuntimeSession(Path("m.onnx"), Doubling("Cpu")).bind({"z": np.zeros(1, np.float32)}, {})


def test_what_onnx_runtime_refuses_is_told() -> None:
    with pytest.raises(ProviderError, match=r"m\.onnx: x cannot be bound: Invalid type of x"):
        OnnxRuntimeSession(Path("m.onnx"), Doubling("Cpu")).bind({"x": np.zeros(1)}, {})
