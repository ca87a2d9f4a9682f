"""JSON files beside the manifest that say which version of their format they are in."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from dspark.runtime.bundle import SchemaVersion, first_problem
from dspark.runtime.errors import BundleError

__all__ = ["read_versioned"]

Content = TypeVar("Content", bound=BaseModel)


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
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error}") from error
    try:
        found = SchemaVersion.model_validate_json(content).schema_version
        if found != version:
            raise BundleError(f"{file}: schema version {found}; this runtime reads {version}{advice}")
        return model.model_validate_json(content)
    except ValidationError as error:
        raise BundleError(f"{file}: {first_problem(error)}{advice}") from error
