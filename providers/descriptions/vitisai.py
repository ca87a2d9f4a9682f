"""AMD NPUs (Ryzen AI) through Vitis AI.

Sources: onnxruntime.ai, "AMD - Vitis AI"; ryzenai.docs.amd.com, "Model Compilation and Deployment".
"""

from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider

__all__ = ["VITIS_AI"]

VITIS_AI = OnnxRuntimeProvider(
    name="vitis-ai",
    aliases=("VitisAIExecutionProvider", "vitisai", "ryzen-ai"),
    execution_provider="VitisAIExecutionProvider",
    precisions=frozenset({"bf16"}),
    cache_forms=frozenset({"delta"}),
    static_shapes=True,
    options=frozenset(
        {"cache_dir", "cache_key", "config_file", "enable_cache_file_io_in_mem", "encryptionKey", "log_level", "xclbin"}
    ),
    install="install AMD's Ryzen AI Software, which brings its own ONNX Runtime (ryzenai.docs.amd.com)",
)
