"""Reads targets and drafters, in whatever format they come, into one description.

Only headers and configurations are read; tensors stay on disk until the exporter asks for their rows.
"""

from pathlib import Path

from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.checkpoints.drafter import read_drafter
from dspark.exporter.checkpoints.gguf import read_gguf
from dspark.exporter.checkpoints.target import read_target_folder

__all__ = ["Drafter", "Target", "read_drafter", "read_target"]


def read_target(path: Path) -> Target:
    """Reads a target model with its tokenizer and chat template.

    Args:
        path: A Hugging Face folder, or a ``.gguf`` file.

    Raises:
        CheckpointError: If it cannot be read or is not supported; says what is wrong with which file.
    """
    return read_gguf(path) if path.suffix == ".gguf" else read_target_folder(path)
