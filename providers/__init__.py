"""Device families that run exported graphs.

Names are loaded when they are first used, so that errors and provider names can be had without the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark.providers.errors import DSparkError, PluginError, ProviderError
    from dspark.providers.monitors import DeviceLoad, DeviceMonitor
    from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider, Plugin
    from dspark.providers.provider import DEFAULT_LOADING, Discovery, LoadOptions, Provider
    from dspark.providers.registry import PROVIDERS, added_providers, find_provider
    from dspark.providers.selection import ON_CPU, Choice, Selection
    from dspark.providers.session import (
        Call,
        DeviceArray,
        DeviceSession,
        NodeTime,
        PlacedNode,
        ProfiledSession,
        Session,
    )

__all__ = [
    "DEFAULT_LOADING",
    "ON_CPU",
    "PROVIDERS",
    "Call",
    "Choice",
    "DSparkError",
    "DeviceArray",
    "DeviceLoad",
    "DeviceMonitor",
    "DeviceSession",
    "Discovery",
    "LoadOptions",
    "NodeTime",
    "OnnxRuntimeProvider",
    "PlacedNode",
    "Plugin",
    "PluginError",
    "ProfiledSession",
    "Provider",
    "ProviderError",
    "Selection",
    "Session",
    "added_providers",
    "find_provider",
]

_MODULES = {
    "errors": ("DSparkError", "PluginError", "ProviderError"),
    "monitors": ("DeviceLoad", "DeviceMonitor"),
    "onnxruntime.provider": ("OnnxRuntimeProvider", "Plugin"),
    "provider": ("DEFAULT_LOADING", "Discovery", "LoadOptions", "Provider"),
    "registry": ("PROVIDERS", "added_providers", "find_provider"),
    "selection": ("ON_CPU", "Choice", "Selection"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "session")
    return getattr(import_module(f"{__name__}.{module}"), name)
