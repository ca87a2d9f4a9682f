"""Files of a checkpoint: there, not there, or something else in their place, which is refused by name."""

import json
from pathlib import Path
from typing import Any

from dspark.exporter.errors import CheckpointError

__all__ = ["has_file", "read_json", "read_text"]

POINTER = b"version https://git-lfs.github.com/spec/"


def has_file(path: Path) -> bool:
    """Whether a checkpoint has this file.

    Raises:
        CheckpointError: If a folder, a link to nothing or a Git LFS pointer stands in its place, or it cannot be read.
    """
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} cannot be read: it is a link to {path.readlink()}, which is not there.")
    if path.is_dir():
        raise CheckpointError(f"{path} cannot be read: it is a directory, where a file is needed.")
    try:
        with path.open("rb") as file:
            beginning = file.read(len(POINTER))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if beginning == POINTER:
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository to fetch the file."
        )
    return True


def read_text(path: Path) -> str:
    """Content of a text file in UTF-8, without a byte-order mark.

    Raises:
        CheckpointError: If it is missing or no such file.
    """
    if not has_file(path):
        raise CheckpointError(f"{path.parent} has no {path.name}.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file that holds an object.

    Raises:
        CheckpointError: If it is missing or holds anything else.
    """
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; a JSON object is needed.")
    return content
