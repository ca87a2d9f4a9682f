"""CPUs and GPUs through ggml's kernels (Metal, Vulkan).

Source: github.com/thewh1teagle/onnxruntime-ggml, "Options".
"""

from dataclasses import dataclass

from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider, Plugin

__all__ = ["GGML"]


@dataclass(frozen=True, kw_only=True)
class GgmlProvider(OnnxRuntimeProvider):
    """ggml, which has threads of its own."""

    def default_options(self, threads: int | None) -> dict[str, str]:
        """Exact computation, and the host's threads."""
        return super().default_options(threads) | ({} if threads is None else {"threads": str(threads)})


GGML = GgmlProvider(
    name="ggml",
    aliases=("GgmlExecutionProvider",),
    execution_provider="ggml",
    plugin=Plugin("onnxruntime_ggml", "onnxruntime-ggml", "any processor", locate="library_path"),
    precisions=frozenset({"fp32"}),
    cache_forms=frozenset({"delta"}),
    options=frozenset({"accel", "device", "dump", "partial", "sticky", "threads", "weights"}),
    # Weights would be rounded to float16, and inputs that look unchanged in a sample of them not be read again.
    defaults=(("sticky", "0"), ("weights", "f32")),
    install="pip install onnxruntime-ggml, which pins its own ONNX Runtime: give it its own environment",
)
