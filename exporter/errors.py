"""What can go wrong when checkpoints are turned into a bundle."""

from dspark.providers.errors import DSparkError

__all__ = ["CheckpointError", "DSparkError", "ExportError", "ParityError"]


class CheckpointError(DSparkError):
    """A checkpoint is missing, unreadable, unsupported, or contradicts itself or its target."""


class ExportError(DSparkError):
    """The bundle cannot be written where or how it was asked for."""


class ParityError(DSparkError):
    """The exported graphs do not compute what the PyTorch reference computes."""
