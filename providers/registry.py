"""Which providers there are."""

import difflib

from dspark.providers.cpu import CPU
from dspark.providers.cuda import CUDA
from dspark.providers.errors import ProviderError
from dspark.providers.provider import Provider
from dspark.providers.tensorrt import TENSORRT_PROVIDER, TENSORRT_RTX_PROVIDER

__all__ = ["PROVIDERS", "find_provider"]

PROVIDERS: tuple[Provider, ...] = (CPU, CUDA, TENSORRT_PROVIDER, TENSORRT_RTX_PROVIDER)


def find_provider(name: str) -> Provider:
    """The provider with this name or alias.

    Raises:
        ProviderError: There is none; the message suggests the nearest name.
    """
    for provider in PROVIDERS:
        if name.lower() in {provider.name, *(alias.lower() for alias in provider.aliases)}:
            return provider
    names = [provider.name for provider in PROVIDERS]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    suggestion = f" Did you mean {near[0]!r}?" if near else ""
    raise ProviderError(f"Unknown provider {name!r}; known providers: {', '.join(names)}.{suggestion}")
