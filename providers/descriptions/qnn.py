"""Qualcomm NPUs through QNN, and their simulator on x86 processors.

Source: github.com/onnxruntime/onnxruntime-qnn, "QNN Execution Provider".
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark.providers.onnxruntime.library import Plugin
from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider
from dspark.providers.provider import Options

__all__ = ["QNN"]

# A simulator has no chip of its own, so it has to be told which one to compile for, or it cannot finalise a graph: 57
# is SM8650, the Snapdragon 8 Gen 3. A process's first session decides it for all of them.
SIMULATED = (("soc_model", "57"),) if platform.machine().lower() in {"x86_64", "amd64"} else ()


@dataclass(frozen=True, kw_only=True)
class QnnProvider(OnnxRuntimeProvider):
    """QNN, whose library offers each of a chip's processors as a device."""

    def select(self, devices: Sequence[Any], options: Options) -> tuple[Sequence[Any], dict[str, str]]:
        """The NPU if there is one: the other devices stand for the GPU backend, or for the host of the simulator."""
        wanted = {"gpu": "GPU", "cpu": "CPU"}.get(options.get("backend_type", ""), "NPU")
        there = [device for device in devices if device.device.type.name == wanted]
        return (there or devices)[:1], dict(options)


QNN = QnnProvider(
    name="qnn",
    aliases=("QNNExecutionProvider", "qualcomm", "hexagon"),
    execution_provider="QNNExecutionProvider",
    plugin=Plugin("onnxruntime_qnn", "onnxruntime-qnn", "Snapdragon's NPU and GPU, or x86 for the simulator"),
    precisions=frozenset({"fp32", "fp16"}),
    cache_forms=frozenset({"delta"}),
    static_shapes=True,
    options=frozenset(
        {
            "backend_path",
            "backend_type",
            "device_id",
            "disable_file_mapped_weights",
            "enable_htp_fp16_precision",
            "enable_htp_shared_memory_allocator",
            "enable_htp_spill_fill_buffer",
            "enable_vtcm_backup_buffer_sharing",
            "extended_udma",
            "htp_arch",
            "htp_bf16_enable",
            "htp_graph_finalization_optimization_mode",
            "htp_performance_mode",
            "htp_share_resource_optimization",
            "num_graph_prepare_threads",
            "offload_graph_io_quantization",
            "profiling_file_path",
            "profiling_level",
            "qnn_context_priority",
            "rpc_control_latency",
            "skip_qnn_version_check",
            "soc_model",
            "vtcm_mb",
        }
    ),
    defaults=(("backend_type", "htp"), *SIMULATED),
    run_options=frozenset(
        {
            "backend_path",
            "device_id",
            "disable_file_mapped_weights",
            "enable_htp_shared_memory_allocator",
            "htp_performance_mode",
            "num_graph_prepare_threads",
            "profiling_file_path",
            "profiling_level",
            "qnn_context_priority",
            "rpc_control_latency",
            "skip_qnn_version_check",
        }
    ),
    install="pip install 'dspark-onnx[qnn]'",
)
