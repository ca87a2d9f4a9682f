"""Device families that run exported graphs, and compile them.

``session`` is all that the runtime needs of a loaded graph, ``provider`` of a device family. A folder for each way to
run graphs implements sessions, ``descriptions`` has the providers, ``registry`` lists them, and users choose with a
``Selection``. Names are loaded when they are first used, so that errors and provider names can be had without the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark.providers.errors import DSparkError, PluginError, ProviderError
    from dspark.providers.monitors import DeviceLoad, DeviceMonitor
    from dspark.providers.onnxruntime.library import Plugin
    from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider
    from dspark.providers.provider import DEFAULT_LOADING, CompileOptions, Discovery, LoadOptions, Provider
    from dspark.providers.registry import PROVIDERS, added_providers, find_provider
    from dspark.providers.selection import ON_CPU, Choice, Selection
    from dspark.providers.session import (
        Call,
        DeviceArray,
        DeviceSession,
        LimitedSession,
        NodeTime,
        PlacedNode,
        ProfiledSession,
        Session,
        SessionLimits,
        limits_of,
    )

__all__ = [
    "DEFAULT_LOADING",
    "ON_CPU",
    "PROVIDERS",
    "Call",
    "Choice",
    "CompileOptions",
    "DSparkError",
    "DeviceArray",
    "DeviceLoad",
    "DeviceMonitor",
    "DeviceSession",
    "Discovery",
    "LimitedSession",
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
    "SessionLimits",
    "added_providers",
    "find_provider",
    "limits_of",
]

_MODULES = {
    "errors": ("DSparkError", "PluginError", "ProviderError"),
    "monitors": ("DeviceLoad", "DeviceMonitor"),
    "onnxruntime.library": ("Plugin",),
    "onnxruntime.provider": ("OnnxRuntimeProvider",),
    "provider": ("DEFAULT_LOADING", "CompileOptions", "Discovery", "LoadOptions", "Provider"),
    "registry": ("PROVIDERS", "added_providers", "find_provider"),
    "selection": ("ON_CPU", "Choice", "Selection"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "session")
    return getattr(import_module(f"{__name__}.{module}"), name)
