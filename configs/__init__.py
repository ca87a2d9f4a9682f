"""Data the other packages read: YAML files, and one function for each."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

__all__ = ["model_defaults"]


@cache
def model_defaults() -> Mapping[str, Mapping[str, Any]]:
    """What transformers assumes where a decoder's configuration is silent.

    Returns:
        For each supported ``model_type`` the values of its configuration class.
    """
    import yaml  # only the exporter has it; the runtime reads other data of this package

    text = files("dspark.configs").joinpath("model_defaults.yaml").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return MappingProxyType({name: MappingProxyType(values) for name, values in content.items()})
