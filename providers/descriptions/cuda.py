"""NVIDIA GPUs through ONNX Runtime's CUDA provider.

Source: onnxruntime.ai, "NVIDIA - CUDA".
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dspark.providers.cuda.graph import ENABLE_CUDA_GRAPH, wants_cuda_graphs
from dspark.providers.cuda.memory import Cuda
from dspark.providers.cuda.session import CudaSession
from dspark.providers.errors import ProviderError
from dspark.providers.monitors import NvidiaMonitor
from dspark.providers.onnxruntime.provider import SHAPE_OPERATORS, OnnxRuntimeProvider
from dspark.providers.provider import NOTHING, LoadOptions, Options

__all__ = ["CUDA"]


@dataclass(frozen=True, kw_only=True)
class CudaProvider(OnnxRuntimeProvider):
    """NVIDIA GPUs through ONNX Runtime's own kernels."""

    def wrap(
        self, model: Path, session: Any, how: LoadOptions, folder: "TemporaryDirectory[str] | None"
    ) -> CudaSession:
        """A session whose arrays may lie on the GPU."""
        return CudaSession(model, session, cuda_graphs=wants_cuda_graphs(how.options), folder=folder)

    def device_name(self, options: Options = NOTHING) -> str | None:
        """Name of the GPU as CUDA numbers them, which environment variables change."""
        try:
            return Cuda().device_name()
        except ProviderError:  # no GPU: loading a graph tells
            return None


CUDA = CudaProvider(
    name="cuda",
    aliases=("CUDAExecutionProvider", "nvidia"),
    execution_provider="CUDAExecutionProvider",
    precisions=frozenset({"fp32", "fp16", "bf16", "int8-blocks", "int8-weights", "int4"}),
    host_operators=SHAPE_OPERATORS,
    options=frozenset(
        {
            "arena_extend_strategy",
            "cudnn_conv_algo_search",
            "do_copy_in_default_stream",
            ENABLE_CUDA_GRAPH,
            "gpu_mem_limit",
            "prefer_nhwc",
            "sdpa_kernel",
            "tunable_op_enable",
            "tunable_op_tuning_enable",
            "use_ep_level_unified_stream",
            "use_tf32",
            "user_compute_stream",
        }
    ),
    # TensorFloat-32 rounds float32 products to ten bits, which would not be the model's output any more.
    defaults=(("use_tf32", "0"),),
    install="pip install 'dspark-onnx[cuda]' on a host with an NVIDIA driver",
    monitor=NvidiaMonitor(),
)
