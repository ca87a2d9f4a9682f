"""TensorRT engines: for the GPU they were built on, and for RTX GPUs."""

from dataclasses import dataclass
from pathlib import Path

from dspark.providers.provider import Provider
from dspark.providers.session import Session
from dspark.providers.tensorrt_engine import TENSORRT, TENSORRT_RTX, Backend
from dspark.providers.tensorrt_session import TensorRtSession

__all__ = ["TENSORRT_PROVIDER", "TENSORRT_RTX_PROVIDER"]


@dataclass(frozen=True)
class TensorRtProvider(Provider):
    """Engines that ``dspark-export --compile`` wrote into the bundle.

    Attributes:
        backend: The library.
    """

    backend: Backend

    def open(self, model: Path, *, threads: int | None) -> Session:
        """Loads the engine of a graph; it needs no host threads."""
        return TensorRtSession(self.backend, model)


PRECISIONS = frozenset({"fp32", "fp16", "bf16", "int8-weights"})

TENSORRT_PROVIDER = TensorRtProvider("tensorrt", ("trt",), PRECISIONS, TENSORRT)
TENSORRT_RTX_PROVIDER = TensorRtProvider("tensorrt-rtx", ("trt-rtx",), PRECISIONS, TENSORRT_RTX)
