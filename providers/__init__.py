"""Device families that run exported graphs."""

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
