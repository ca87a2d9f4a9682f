"""JSON files of a bundle that say which version of their format they are in."""

import json
import reprlib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dspark.runtime.errors import BundleError

__all__ = ["read_versioned", "unique_keys"]

Content = TypeVar("Content", bound=BaseModel)


class SchemaVersion(BaseModel):
    """The version that a file says it has, read before the rest, which other versions may spell otherwise."""

    schema_version: int | str


def read_versioned(file: Path, model: type[Content], version: int, advice: str = "") -> Content | None:
    """Reads a file; None if there is none.

    Args:
        file: Its path.
        model: What it has to hold.
        version: The ``schema_version`` that the model describes.
        advice: Ends the message of what the file's content is refused with.

    Raises:
        BundleError: The file cannot be read, is damaged, or is of another version.
    """
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error}") from error
    try:
        found = SchemaVersion.model_validate_json(content).schema_version
        if found != version:
            raise BundleError(f"{file}: schema version {found}; this runtime reads version {version}{advice}")
        json.loads(content, object_pairs_hook=unique_keys)
        return model.model_validate_json(content)
    except ValidationError as error:
        raise BundleError(f"{file}: {_first_problem(error)}{advice}") from error
    except ValueError as error:
        raise BundleError(f"{file}: {error}{advice}") from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of whose repeated keys a parser would take the last.

    Args:
        pairs: Its keys and values, as ``json.loads`` passes them to its ``object_pairs_hook``.

    Raises:
        ValueError: A key of an object stands there twice.
    """
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"key {key!r} stands there twice")
        seen.add(key)
    return dict(pairs)


def _first_problem(error: ValidationError) -> str:
    """The first thing that is wrong with a file: where, what, and what stands there."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":
        return f"{place}: {first['ctx']['error']}".removeprefix(": ")
    instead = f", not {reprlib.repr(first['input'])}" if place and first["msg"].startswith("Input should") else ""
    return f"{place or 'the file'}: {first['msg']}{instead}"
