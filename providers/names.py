"""Names of the providers, for shell completion: reading them loads no library."""

from importlib import metadata

__all__ = ["ENTRY_POINTS", "PROVIDER_NAMES", "provider_names"]

ENTRY_POINTS = "dspark.providers"
"""The group in which packages of others announce their providers."""
PROVIDER_NAMES = (
    *("cpu", "cuda", "tensorrt", "tensorrt-rtx", "tensorrt-ort", "nv-tensorrt-rtx", "openvino", "qnn", "cann"),
    *("vitis-ai", "migraphx", "coreml", "webgpu", "ggml"),
)
"""Those that come with the package, in the order of the registry."""


def provider_names() -> list[str]:
    """The package's own providers, and those that other packages add."""
    return [*PROVIDER_NAMES, *(point.name for point in metadata.entry_points(group=ENTRY_POINTS))]
