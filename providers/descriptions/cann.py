"""Huawei Ascend NPUs through CANN.

Source: onnxruntime.ai, "Huawei - CANN".
"""

from dspark.providers.monitors import AscendMonitor
from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider

__all__ = ["CANN"]

CANN = OnnxRuntimeProvider(
    name="cann",
    aliases=("CANNExecutionProvider", "ascend", "huawei"),
    execution_provider="CANNExecutionProvider",
    precisions=frozenset({"fp32", "fp16"}),
    cache_forms=frozenset({"delta"}),
    static_shapes=True,
    options=frozenset(
        {
            "arena_extend_strategy",
            "device_id",
            "do_copy_in_default_stream",
            "dump_graphs",
            "dump_om_model",
            "enable_cann_graph",
            "npu_mem_limit",
            "op_select_impl_mode",
            "optypelist_for_implmode",
            "precision_mode",
        }
    ),
    # By default CANN computes float32 products in float16; the types of the graph are the precision that was chosen.
    defaults=(("precision_mode", "must_keep_origin_dtype"),),
    install="pip install 'dspark-onnx[cann]' on a host with an Ascend NPU and the CANN toolkit",
    monitor=AscendMonitor(),
)
