"""What can go wrong when a bundle is loaded and used."""

from dspark.providers.errors import DSparkError, ProviderError

__all__ = ["BundleError", "DSparkError", "NumericalError", "ProviderError", "RequestError"]


class BundleError(DSparkError):
    """A bundle is missing, incomplete, altered, or of another version."""


class RequestError(DSparkError):
    """A request asks for something the bundle cannot do."""


class NumericalError(DSparkError):
    """A graph returned a value that is not a finite number."""
