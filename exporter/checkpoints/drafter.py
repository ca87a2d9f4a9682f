"""Recognises a drafter's layout and reads it."""

from pathlib import Path

from dspark.exporter.checkpoints import deepspec, eagle3, zlab
from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.checkpoints.folder import Folder, open_folder
from dspark.exporter.checkpoints.speculators import read_speculators
from dspark.exporter.errors import CheckpointError

__all__ = ["read_drafter"]

READERS = {
    **dict.fromkeys(deepspec.ARCHITECTURES, deepspec.read_deepspec),
    **dict.fromkeys(eagle3.DEEPSPEC_ARCHITECTURES, eagle3.read_deepspec_eagle3),
    **dict.fromkeys(zlab.ARCHITECTURES, zlab.read_zlab),
}
SUPPORTED = ", ".join((*READERS, *eagle3.ARCHITECTURES, "and speculators' dspark, dflash and eagle3"))


def read_drafter(path: Path, target: Target) -> Drafter:
    """Reads a drafter and checks it against its target.

    Args:
        path: A folder with ``config.json`` and safetensors in the layout of DeepSpec, z-lab, speculators or EAGLE-3.
        target: What it drafts for.

    Raises:
        CheckpointError: If it cannot be read, is not supported, contradicts itself, or does not fit the target. Nothing
            but headers and the vocabulary tables has been read by then.
    """
    folder = open_folder(path)
    for name in folder.tensors:
        if name.startswith("mtp."):
            raise _bundled(folder, name)
    if "speculators_model_type" in folder.config:
        return read_speculators(folder, target)
    for architecture in folder.architectures:
        if architecture in READERS:
            return READERS[architecture](folder, target)
        if architecture.startswith(("Gemma", "DFlash2")):
            raise CheckpointError(f"{folder.where}: {architecture} is not supported yet; supported are {SUPPORTED}.")
    if "dspark_block_size" in folder.config:
        raise _bundled(folder, "dspark_block_size")
    if eagle3.is_legacy_eagle3(folder):
        return eagle3.read_legacy_eagle3(folder, target)
    raise CheckpointError(
        f"{folder.where}: architectures = {folder.architectures!r} is no known drafter; supported are {SUPPORTED}."
    )


def _bundled(folder: Folder, sign: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.where}: target and drafter are bundled in one checkpoint ({sign}), as DeepSeek-V4 does; that is not "
        "supported."
    )
