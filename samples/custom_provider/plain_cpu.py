"""A provider of one's own: every node as the exporter wrote it, on ONNX Runtime's CPU provider.

Where a graph gives other values on ``plain-cpu`` than on ``cpu``, an optimisation of ONNX Runtime makes the difference.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.providers import OnnxRuntimeProvider

__all__ = ["PLAIN_CPU"]


@dataclass(frozen=True, kw_only=True)
class PlainCpuProvider(OnnxRuntimeProvider):
    """ONNX Runtime's CPU provider without fused or folded nodes."""

    def configure(self, model: Path, session_options: Any) -> None:
        """Turns ONNX Runtime's graph optimisations off."""
        session_options.graph_optimization_level = type(session_options.graph_optimization_level).ORT_DISABLE_ALL


PLAIN_CPU = PlainCpuProvider(
    name="plain-cpu",
    execution_provider="CPUExecutionProvider",
    precisions=frozenset({"fp32", "fp16", "int8", "int8-blocks", "int8-weights", "int4"}),
    install="pip install 'dspark-onnx[cpu]'",
)
