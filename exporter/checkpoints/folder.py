"""A checkpoint folder: its configuration, and its tensors under their canonical names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.exporter.checkpoints.files import has_file, read_json
from dspark.exporter.checkpoints.safetensors import has_weights, read_safetensors
from dspark.exporter.checkpoints.tensors import FileTensor
from dspark.exporter.errors import CheckpointError

__all__ = ["Folder", "check_unquantised", "open_folder", "read_architectures"]

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True)
class Folder:
    """A folder with ``config.json`` and safetensors, of which only the headers have been read.

    Attributes:
        path: The folder.
        config: Content of ``config.json``.
        tensors: By name, without ``model.`` and without the rotation tables that older files carry.
        files: The weight files.
        notes: What its user should know.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, FileTensor]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

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
        CheckpointError: If a file is missing or damaged, the weights are quantised, or it holds an adapter alone.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder and no GGUF file; {CONFIG_FILE} and safetensors are needed.")
    notes = _adapter_notes(path)
    config = read_json(path / CONFIG_FILE)
    check_unquantised(config, str(path / CONFIG_FILE))
    stored, files = read_safetensors(path)
    tensors: dict[str, FileTensor] = {}
    for full_name, tensor in stored.items():
        name = full_name.removeprefix("model.")
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name in tensors:
            raise CheckpointError(f"{path} has {name} twice, with and without the prefix model.")
        tensors[name] = tensor
    return Folder(path, config, tensors, files, notes)


def _adapter_notes(folder: Path) -> tuple[str, ...]:
    """Refuses an adapter without its base; beside whole weights it is not applied."""
    if not has_file(folder / ADAPTER_FILE):
        return ()
    if has_weights(folder):
        return (f"{folder / ADAPTER_FILE} is not applied: the weights beside it are exported as they are",)
    adapter = read_json(folder / ADAPTER_FILE)
    base, kind = adapter.get("base_model_name_or_path"), adapter.get("peft_type", "LoRA")
    raise CheckpointError(
        f"{folder} holds a {kind} adapter, not a whole model; merge it into its base, "
        f"{base or 'which its adapter_config.json does not name'} (peft: merge_and_unload, then save_pretrained), and "
        "export the result."
    )


def check_unquantised(config: Mapping[str, Any], where: str) -> None:
    """Refuses a quantised checkpoint.

    Raises:
        CheckpointError: The configuration names a quantisation.
    """
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise CheckpointError(
            f"{where}: quantization_config ({method}) is not supported; use the unquantised checkpoint."
        )


def read_architectures(config: Mapping[str, Any], where: str) -> list[str]:
    """The ``architectures`` of a configuration, empty if it names none.

    Raises:
        CheckpointError: If it is not a list of names.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: architectures = {names!r}; a list of names is needed.")
    return names
