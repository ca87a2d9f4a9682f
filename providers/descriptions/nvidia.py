"""NVIDIA GPUs through ONNX Runtime: TensorRT, TensorRT for RTX.

Sources: onnxruntime.ai, "NVIDIA - TensorRT"; nvidia.github.io/TensorRT-RTX-EP-ABI, "Provider
options".
"""

from dspark.providers.monitors import NvidiaMonitor
from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider, Plugin

__all__ = ["NV_TENSORRT_RTX", "TENSORRT"]

TENSORRT = OnnxRuntimeProvider(
    name="tensorrt-ort",
    aliases=("TensorrtExecutionProvider",),
    execution_provider="TensorrtExecutionProvider",
    precisions=frozenset({"fp32", "fp16", "bf16", "int8-weights"}),
    cache_forms=frozenset({"delta"}),
    options=frozenset(
        {
            "device_id",
            "trt_auxiliary_streams",
            "trt_bf16_enable",
            "trt_builder_optimization_level",
            "trt_context_memory_sharing_enable",
            "trt_engine_cache_enable",
            "trt_engine_cache_path",
            "trt_engine_cache_prefix",
            "trt_engine_hw_compatible",
            "trt_fp16_enable",
            "trt_max_workspace_size",
            "trt_profile_max_shapes",
            "trt_profile_min_shapes",
            "trt_profile_opt_shapes",
            "trt_timing_cache_enable",
            "trt_timing_cache_path",
            "user_compute_stream",
        }
    ),
    install="pip install 'dspark-onnx[tensorrt]' on a host with an NVIDIA driver",
    monitor=NvidiaMonitor(),
)

NV_TENSORRT_RTX = OnnxRuntimeProvider(
    name="nv-tensorrt-rtx",
    aliases=("NvTensorRTRTXExecutionProvider", "NvTensorRtRtx"),
    execution_provider="NvTensorRTRTXExecutionProvider",
    plugin=Plugin("onnxruntime_ep_nv_tensorrt_rtx", "onnxruntime-ep-nv-tensorrt-rtx", "RTX GPUs since Ampere"),
    precisions=frozenset({"fp32", "fp16", "bf16", "int8-weights"}),
    cache_forms=frozenset({"delta"}),
    options=frozenset(
        {
            "device_id",
            "has_user_compute_stream",
            "nv_detailed_build_log",
            "nv_dump_subgraphs",
            "nv_max_shared_mem_size",
            "nv_max_workspace_size",
            "nv_multi_profile_enable",
            "nv_op_types_to_exclude",
            "nv_profile_max_shapes",
            "nv_profile_min_shapes",
            "nv_profile_opt_shapes",
            "nv_runtime_cache_path",
            "nv_use_external_data_initializer",
            "nv_weight_streaming_budget",
            "user_compute_stream",
        }
    ),
    install="pip install onnxruntime onnxruntime-ep-nv-tensorrt-rtx on a host with an RTX GPU",
    monitor=NvidiaMonitor(),
)
