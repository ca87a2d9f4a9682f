"""ONNX Runtime's boundary, faked: what a provider passes to it is written down, and answered as its documentation says.

Sources: onnxruntime.ai, "Using a Plugin Execution Provider Library" and the Python API reference.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.providers import PROVIDERS, OnnxRuntimeProvider
from tests.support import fake_cuda

__all__ = ["FALLBACK_REFUSED", "MINE", "FakeDevice", "FakeOnnxRuntime", "Install", "install"]

MINE = OnnxRuntimeProvider(
    name="mine",
    execution_provider="MineExecutionProvider",
    precisions=frozenset({"fp16"}),
    options=frozenset({"chip", "verbose"}),
    defaults=(("chip", "7"),),
    run_options=frozenset({"verbose"}),
)
"""A provider as a third party writes it."""

FALLBACK_REFUSED = (
    "[ONNXRuntimeError] : 1 : FAIL : This session contains graph nodes that are assigned to the default CPU EP, "
    "but fallback to CPU EP has been explicitly disabled by the user."
)


@dataclass
class FakeDevice:
    """An ``OrtEpDevice``."""

    ep_name: str
    kind: str = "NPU"
    ep_metadata: Mapping[str, str] = field(default_factory=dict)
    ep_vendor: str = "Vendor"

    @property
    def device(self) -> Any:
        return SimpleNamespace(type=SimpleNamespace(name=self.kind), vendor=self.ep_vendor)


class _SessionOptions:
    def __init__(self) -> None:
        self.config: dict[str, str] = {}
        self.dimensions: dict[str, int] = {}
        self.added: tuple[list[FakeDevice], dict[str, str]] | None = None
        self.log_severity_level = 2
        self.intra_op_num_threads = 0
        self.enable_profiling = False
        self.profile_file_prefix = ""

    def add_session_config_entry(self, name: str, value: str) -> None:
        self.config[name] = value

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        self.dimensions[name] = size

    def add_provider_for_devices(self, devices: Sequence[FakeDevice], options: Mapping[str, str]) -> None:
        assert devices, "ONNX Runtime refuses an empty list"
        assert all(isinstance(value, str) for value in options.values())
        self.added = list(devices), dict(options)


@dataclass
class FakeOnnxRuntime:
    """The module ``onnxruntime``.

    Attributes:
        built_in: Names of providers built in, besides the CPU's.
        libraries: Devices that a plug-in library drives, by its path.
        refuses: What loading a library raises.
        fallen: Nodes that no provider but the CPU's takes, as (name, operator).
        started: Whether a built-in provider starts; else ONNX Runtime uses the CPU without a word.
        compiles: Whether the provider writes compiled models when it is asked to.
        unreadable: What loading a compiled model raises.
        sessions: The session options of every session, and the ``providers`` argument.
        loaded: The files of all sessions.
    """

    built_in: tuple[str, ...] = ()
    libraries: Mapping[str, Sequence[FakeDevice]] = field(default_factory=dict)
    refuses: str | None = None
    fallen: Sequence[tuple[str, str]] = ()
    started: bool = True
    compiles: bool = True
    unreadable: str | None = None
    loaded: list[Path] = field(default_factory=list)
    sessions: list[tuple[_SessionOptions, Any]] = field(default_factory=list)
    registered: dict[str, str] = field(default_factory=dict)
    __version__: str = "1.32.0"
    __file__: str = "/nowhere/onnxruntime/__init__.py"
    SessionOptions: Any = _SessionOptions

    def get_available_providers(self) -> list[str]:
        return [*self.built_in, "CPUExecutionProvider"]

    def get_ep_devices(self) -> list[FakeDevice]:
        loaded = [device for path in self.registered.values() for device in self.libraries[path]]
        return [FakeDevice("CPUExecutionProvider", "CPU"), *loaded]

    def register_execution_provider_library(self, name: str, path: str) -> None:
        if self.refuses is not None:
            raise RuntimeError(self.refuses)
        if name in self.registered:
            raise RuntimeError(f"EP library is already registered under {name}")
        self.registered[name] = path

    def InferenceSession(  # noqa: N802 - ONNX Runtime's name
        self, path: str, options: _SessionOptions, *, providers: Any = None, enable_fallback: int = 1
    ) -> Any:
        assert enable_fallback == 0, "a session that fails is not to be opened again on the CPU"
        self.sessions.append((options, providers))
        name = options.added[0][0].ep_name if options.added else providers[0][0]
        if self.fallen and options.config.get("session.disable_cpu_ep_fallback") == "1":
            raise RuntimeError(FALLBACK_REFUSED)
        self.loaded.append(Path(path))
        if self.unreadable is not None and "engines" in path:
            raise RuntimeError(self.unreadable)
        if self.compiles and options.config.get("ep.context_enable") == "1":
            Path(options.config["ep.context_file_path"]).write_bytes(b"compiled")
        nodes = [("taken", "MatMul", name), *((*node, "CPUExecutionProvider") for node in self.fallen)]
        recorded = options.config.get("session.record_ep_graph_assignment_info") == "1"
        return SimpleNamespace(
            get_providers=lambda: [*([name] if self.started else []), "CPUExecutionProvider"],
            get_provider_graph_assignment_info=lambda: [
                SimpleNamespace(
                    ep_name=provider, get_nodes=lambda n=node, o=operator: [SimpleNamespace(name=n, op_type=o)]
                )
                for node, operator, provider in nodes
                if recorded
            ],
        )


def install(
    monkeypatch: pytest.MonkeyPatch, provider: OnnxRuntimeProvider | None = None, **state: Any
) -> FakeOnnxRuntime:
    """Replaces ONNX Runtime, and the packages of all plug-ins: only the provider's is there."""
    runtime = FakeOnnxRuntime(**state)
    fake_cuda.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    for each in PROVIDERS:
        if isinstance(each, OnnxRuntimeProvider) and each.plugin is not None:
            module = SimpleNamespace(**{each.plugin.locate: lambda: "/vendor/plugin.so"}, __spec__=object())
            monkeypatch.setitem(sys.modules, each.plugin.module, module if each is provider else None)
    return runtime


Install = Callable[..., FakeOnnxRuntime]
"""``install`` of a test."""
