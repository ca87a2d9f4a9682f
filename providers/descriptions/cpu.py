"""ONNX Runtime's own CPU provider: there is one on every host."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.providers.monitors import HostMonitor
from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider

__all__ = ["CPU"]

EXACT_PRODUCTS = "session.x64quantprecision"
"""Makes x86 processors without VNNI multiply unsigned bytes: sums of products with signed ones overflow their 16 bits,
and saturate. Other processors ignore it. Source: ``onnxruntime_session_options_config_keys.h``."""


@dataclass(frozen=True, kw_only=True)
class CpuProvider(OnnxRuntimeProvider):
    """The host's processor."""

    def configure(self, model: Path, session_options: Any) -> None:
        """Asks for exact products of whole numbers, if the graph has such; weights alone need none."""
        if model.is_file() and b"QGemm" in model.read_bytes():
            session_options.add_session_config_entry(EXACT_PRODUCTS, "1")


CPU = CpuProvider(
    name="cpu",
    aliases=("CPUExecutionProvider",),
    execution_provider="CPUExecutionProvider",
    precisions=frozenset({"fp32", "fp16", "int8", "int8-blocks", "int8-weights", "int4"}),
    install="pip install 'dspark-onnx[cpu]'",
    monitor=HostMonitor(),
)
