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
