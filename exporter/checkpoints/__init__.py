"""Reads targets and drafters, in whatever format they come, into one description.

Only headers and configurations are read; tensors stay on disk until the exporter asks for their rows.
"""

from pathlib import Path

from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.checkpoints.drafter import read_drafter
from dspark.exporter.checkpoints.gguf import read_gguf
from dspark.exporter.checkpoints.gguf_file import is_gguf_file
from dspark.exporter.checkpoints.target import read_target_folder

__all__ = ["Drafter", "Target", "is_gguf_file", "read_drafter", "read_target"]


def read_target(path: Path) -> Target:
    """Reads a target model with its tokenizer and chat template.

    Args:
        path: A Hugging Face folder, or a GGUF file of any name.

    Raises:
        CheckpointError: If it cannot be read or is not supported; says what is wrong with which file.
    """
    return read_gguf(path) if is_gguf_file(path) else read_target_folder(path)
