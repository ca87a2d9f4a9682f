"""Apple's Neural Engine and GPUs through Core ML.

Source: onnxruntime.ai, "Apple - CoreML", and coreml_provider_factory.h.
"""

from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider

__all__ = ["COREML"]

COREML = OnnxRuntimeProvider(
    name="coreml",
    aliases=("CoreMLExecutionProvider", "apple"),
    execution_provider="CoreMLExecutionProvider",
    precisions=frozenset({"fp32", "fp16"}),
    cache_forms=frozenset({"delta"}),
    static_shapes=True,
    options=frozenset(
        {
            "AllowLowPrecisionAccumulationOnGPU",
            "EnableOnSubgraphs",
            "MLComputeUnits",
            "ModelCacheDirectory",
            "ModelFormat",
            "ProfileComputePlan",
            "RequireStaticInputShapes",
            "SpecializationStrategy",
        }
    ),
    defaults=(("ModelFormat", "MLProgram"), ("RequireStaticInputShapes", "1")),
    install="pip install 'dspark-onnx[cpu]' on a Mac, whose build of ONNX Runtime has Core ML",
)
