"""Values from configuration files, checked by pydantic models and refused in one line."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark.exporter.errors import CheckpointError

__all__ = ["ConfigModel", "validated"]


class ConfigModel(BaseModel):
    """Base of the models: exact types (no ``"4096"``, no ``true`` for 1), finite numbers, other keys ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=ConfigModel)


def validated(model: type[Model], values: Any, where: str) -> Model:
    """Builds ``model`` from ``values``.

    Args:
        model: What to build.
        values: As they are in the file.
        where: The file or the part of it that holds them, for the message.

    Raises:
        CheckpointError: If a value is missing or wrong: names the first, its value and what would be right.
    """
    try:
        return model.model_validate(dict(values) if isinstance(values, Mapping) else values)
    except ValidationError as error:
        first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    match first["type"]:
        case "value_error":
            raise CheckpointError(f"{where}: {first['msg'].removeprefix('Value error, ')}.")
        case "missing":
            raise CheckpointError(f"{where} lacks {key}.")
        case "extra_forbidden":
            raise CheckpointError(f"{where}: {key} = {first['input']!r} is not known here.")
        case _:
            told = first["msg"].replace("Input", "it", 1)
            raise CheckpointError(f"{where}: {key} = {first['input']!r}; {told}.")
