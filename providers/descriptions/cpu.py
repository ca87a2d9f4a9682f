"""ONNX Runtime's own CPU provider: there is one on every host."""

from dspark.providers.monitors import HostMonitor
from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider

__all__ = ["CPU"]

CPU = OnnxRuntimeProvider(
    name="cpu",
    aliases=("CPUExecutionProvider",),
    execution_provider="CPUExecutionProvider",
    precisions=frozenset({"fp32", "fp16", "int8", "int8-blocks", "int8-weights", "int4"}),
    install="pip install 'dspark-onnx[cpu]'",
    monitor=HostMonitor(),
)
