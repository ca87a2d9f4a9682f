"""GPUs of any vendor through WebGPU.

Sources: onnxruntime.ai, "WebGPU Execution Provider"; pypi.org, onnxruntime-ep-webgpu.
"""

from dspark.providers.cuda.provider import SHAPE_OPERATORS
from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider, Plugin

__all__ = ["WEBGPU"]

WEBGPU = OnnxRuntimeProvider(
    name="webgpu",
    aliases=("WebGpuExecutionProvider",),
    execution_provider="WebGpuExecutionProvider",
    plugin=Plugin(
        "onnxruntime_ep_webgpu", "onnxruntime-ep-webgpu", "GPUs with Direct3D 12, Metal or Vulkan and its loader"
    ),
    precisions=frozenset({"fp32", "fp16", "int4"}),
    cache_forms=frozenset({"delta"}),
    host_operators=SHAPE_OPERATORS,
    options=frozenset(
        {
            "dawnBackendType",
            "deviceId",
            "enableInt64",
            "forceCpuNodeNames",
            "maxStorageBufferBindingSize",
            "powerPreference",
            "preferredLayout",
            "preserveDevice",
            "storageBufferCacheMode",
            "validationMode",
        }
    ),
    defaults=(("enableInt64", "1"),),
    install="pip install onnxruntime onnxruntime-ep-webgpu",
)
