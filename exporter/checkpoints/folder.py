"""A checkpoint folder: its configuration, and its tensors under their canonical names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.exporter.checkpoints.safetensors import read_safetensors
from dspark.exporter.checkpoints.tensors import FileTensor
from dspark.exporter.errors import CheckpointError

__all__ = ["Folder", "open_folder", "read_architectures", "read_json"]

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Folder:
    """A folder with ``config.json`` and safetensors, of which only the headers have been read.

    Attributes:
        path: The folder.
        config: Content of ``config.json``.
        tensors: By name, without ``model.`` and without the rotation tables that older files carry.
        files: The weight files.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, FileTensor]
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """What people call the checkpoint."""
        return self.path.resolve().name

    @property
    def where(self) -> str:
        """The configuration file, for messages."""
        return str(self.path / CONFIG_FILE)

    @property
    def architectures(self) -> list[str]:
        """The classes that the configuration names."""
        return read_architectures(self.config, self.where)


def open_folder(path: Path) -> Folder:
    """Reads a checkpoint folder's configuration and headers.

    Raises:
        CheckpointError: If a file is missing or damaged, or the weights are quantised.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; a checkpoint with {CONFIG_FILE} and safetensors is needed.")
    config = read_json(path / CONFIG_FILE)
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise CheckpointError(
            f"{path / CONFIG_FILE}: quantization_config ({method}) is not supported; use the unquantised checkpoint."
        )
    stored, files = read_safetensors(path)
    tensors: dict[str, FileTensor] = {}
    for full_name, tensor in stored.items():
        name = full_name.removeprefix("model.")
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name in tensors:
            raise CheckpointError(f"{path} has {name} twice, with and without the prefix model.")
        tensors[name] = tensor
    return Folder(path, config, tensors, files)


def read_architectures(config: Mapping[str, Any], where: str) -> list[str]:
    """The ``architectures`` of a configuration, empty if it names none.

    Raises:
        CheckpointError: If it is not a list of names.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: architectures = {names!r}; a list of names is needed.")
    return names


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file that holds an object.

    Raises:
        CheckpointError: If it is missing or holds anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; a JSON object is needed.")
    return content
