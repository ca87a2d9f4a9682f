"""AMD GPUs through MIGraphX.

Source: onnxruntime.ai, "AMD - MIGraphX".
"""

from dspark.providers.monitors import AmdGpuMonitor
from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider

__all__ = ["MIGRAPHX"]

MIGRAPHX = OnnxRuntimeProvider(
    name="migraphx",
    aliases=("MIGraphXExecutionProvider", "rocm"),
    execution_provider="MIGraphXExecutionProvider",
    precisions=frozenset({"fp32", "fp16", "bf16", "int8-weights"}),
    cache_forms=frozenset({"delta"}),
    # It compiles anew for every shape, which dynamic ones would make it do in every other round.
    static_shapes=True,
    options=frozenset(
        {
            "device_id",
            "migraphx_exhaustive_tune",
            "migraphx_fp16_enable",
            "migraphx_int8_calibration_table_name",
            "migraphx_int8_enable",
            "migraphx_int8_use_native_calibration_table",
            "migraphx_mem_limit",
        }
    ),
    install="pip install onnxruntime-migraphx on a host with ROCm",
    monitor=AmdGpuMonitor(),
)
