"""What the other packages read: YAML files with one function for each, and the version."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from types import MappingProxyType
from typing import Any

__all__ = ["DISTRIBUTION", "model_defaults", "own_version", "serving_profiles"]

DISTRIBUTION = "dspark-onnx"
SERVING_PROFILES = ("flash", "pro")


@cache
def model_defaults() -> Mapping[str, Mapping[str, Any]]:
    """What transformers assumes where a decoder's configuration is silent.

    Returns:
        For each supported ``model_type`` the values of its configuration class.
    """
    import yaml  # only the exporter calls this; the runtime loads without it

    text = files("dspark.configs").joinpath("model_defaults.yaml").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return MappingProxyType({name: MappingProxyType(values) for name, values in content.items()})


def serving_profiles() -> Mapping[str, str]:
    """The serving profiles that come with the package: YAML by name."""
    folder = files("dspark.configs")
    return {name: folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8") for name in SERVING_PROFILES}


def own_version() -> str:
    """The version of this project as it is installed: ``version`` of ``pyproject.toml``."""
    return version(DISTRIBUTION)
