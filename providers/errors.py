"""The root of every error this project raises on purpose."""

__all__ = ["DSparkError", "PluginError", "ProviderError", "one_line"]


class DSparkError(Exception):
    """Something the caller can put right; the message names the thing, its value and what would be right.

    Args:
        message: What is wrong. Halves of surrogate pairs, which can stand in JSON but in no output, are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.encode(errors="backslashreplace").decode())


class ProviderError(DSparkError):
    """A provider is unknown, not installed, or cannot run what it was given."""


class PluginError(ProviderError):
    """A provider's library does not work with the ONNX Runtime that is installed."""


def one_line(message: object) -> str:
    """What a library says, an error or a text, without line breaks."""
    return " ".join(str(message).split())
