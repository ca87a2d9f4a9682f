"""Device families that run exported graphs."""

from dspark.providers.errors import DSparkError, ProviderError
from dspark.providers.provider import Provider
from dspark.providers.registry import PROVIDERS, find_provider
from dspark.providers.session import Call, DeviceArray, DeviceSession, NodeTime, ProfiledSession, Session

__all__ = [
    "PROVIDERS",
    "Call",
    "DSparkError",
    "DeviceArray",
    "DeviceSession",
    "NodeTime",
    "ProfiledSession",
    "Provider",
    "ProviderError",
    "Session",
    "find_provider",
]
