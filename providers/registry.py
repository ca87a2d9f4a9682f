"""Which providers there are: those that come with the package, and those that others install.

A package adds one through an entry point of the group ``dspark.providers``: its name is the provider's, its value an
object of a class derived from ``Provider`` (samples/custom_provider).
"""

from importlib import metadata

from dspark.providers.cuda.provider import CUDA
from dspark.providers.descriptions.cann import CANN
from dspark.providers.descriptions.coreml import COREML
from dspark.providers.descriptions.cpu import CPU
from dspark.providers.descriptions.ggml import GGML
from dspark.providers.descriptions.migraphx import MIGRAPHX
from dspark.providers.descriptions.nvidia import NV_TENSORRT_RTX, TENSORRT
from dspark.providers.descriptions.openvino import OPENVINO
from dspark.providers.descriptions.qnn import QNN
from dspark.providers.descriptions.vitisai import VITIS_AI
from dspark.providers.descriptions.webgpu import WEBGPU
from dspark.providers.errors import ProviderError
from dspark.providers.provider import Provider, suggestion
from dspark.providers.tensorrt.provider import TENSORRT_PROVIDER, TENSORRT_RTX_PROVIDER

__all__ = ["ENTRY_POINTS", "PROVIDERS", "added_providers", "find_provider"]

ENTRY_POINTS = "dspark.providers"
PROVIDERS: tuple[Provider, ...] = (
    CPU,
    CUDA,
    TENSORRT_PROVIDER,
    TENSORRT_RTX_PROVIDER,
    TENSORRT,
    NV_TENSORRT_RTX,
    OPENVINO,
    QNN,
    CANN,
    VITIS_AI,
    MIGRAPHX,
    COREML,
    WEBGPU,
    GGML,
)


def find_provider(name: str) -> Provider:
    """The provider with this name or alias.

    Raises:
        ProviderError: There is none, in which case the message suggests the nearest name, or it cannot be loaded.
    """
    for provider in PROVIDERS:
        if name.lower() in _spellings(provider):
            return provider
    added = added_providers()
    for added_name, found in added.items():
        if isinstance(found, Provider) and name.lower() in _spellings(found):
            return found
        if isinstance(found, ProviderError) and name.lower() == added_name.lower():
            raise found
    names = [*(provider.name for provider in PROVIDERS), *added]
    aliases = {alias.lower(): provider.name for provider in PROVIDERS for alias in provider.aliases}
    near = suggestion(name, [*names, *aliases])
    raise ProviderError(f"Unknown provider {name!r}; known providers: {', '.join(names)}.{near}")


def added_providers() -> dict[str, Provider | ProviderError]:
    """The providers that other packages added, by the names of their entry points; or why one cannot be used."""
    return {point.name: _loaded(point) for point in metadata.entry_points(group=ENTRY_POINTS)}


def _loaded(point: metadata.EntryPoint) -> Provider | ProviderError:
    package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
    try:
        provider = point.load()
    except Exception as error:  # whatever a package of others does when it is imported
        return ProviderError(f"{point.name}: {package} cannot be loaded: {type(error).__name__}: {error}")
    if not isinstance(provider, Provider):
        return ProviderError(
            f"{point.name}: {package} adds {provider!r}; it must be an object of a class derived from Provider"
        )
    taken = {spelling: own.name for own in PROVIDERS for spelling in _spellings(own)}
    for spelling in _spellings(provider):
        if spelling in taken:
            return ProviderError(
                f"{point.name}: {package} calls its provider {spelling!r}, as {taken[spelling]} is called already"
            )
    return provider


def _spellings(provider: Provider) -> set[str]:
    return {provider.name.lower(), *(alias.lower() for alias in provider.aliases)}
