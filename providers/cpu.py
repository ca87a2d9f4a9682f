"""ONNX Runtime's own CPU provider: there is one on every host."""

from dataclasses import dataclass
from pathlib import Path

from dspark.providers.onnxruntime_session import OnnxRuntimeSession
from dspark.providers.provider import Provider
from dspark.providers.session import ProfiledSession, Session

__all__ = ["CPU"]


@dataclass(frozen=True)
class CpuProvider(Provider):
    """The host's processor."""

    def open(self, model: Path, *, threads: int | None) -> Session:
        """Loads a graph on the CPU provider."""
        return OnnxRuntimeSession(model, "CPUExecutionProvider", threads)

    def profile(self, model: Path, *, threads: int | None) -> ProfiledSession:
        """Loads a graph on the CPU provider with ONNX Runtime's profiler."""
        return OnnxRuntimeSession(model, "CPUExecutionProvider", threads, profiled=True)


CPU = CpuProvider(
    name="cpu",
    aliases=("CPUExecutionProvider",),
    precisions=frozenset({"fp32", "fp16", "int8", "int8-weights", "int4"}),
)
