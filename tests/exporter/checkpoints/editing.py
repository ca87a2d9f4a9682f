"""Copies of golden checkpoints that a test can damage."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

__all__ = ["GOLDEN", "Checkpoint", "copy_of"]

GOLDEN = Path(__file__).parents[2] / "golden"


@dataclass
class Checkpoint:
    """A checkpoint folder whose configuration and tensors can be edited; ``write`` puts them on disk."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, NDArray[Any]]

    def write(self) -> Path:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.folder / "model.safetensors")
        return self.folder

    def drop(self, *names: str) -> None:
        for name in names:
            del self.tensors[name]

    def reshape(self, name: str, *shape: int) -> None:
        self.tensors[name] = np.zeros(shape, np.float32)

    def rename(self, old: str, new: str) -> None:
        self.tensors = {name.replace(old, new): tensor for name, tensor in self.tensors.items()}


def copy_of(name: str, into: Path) -> Checkpoint:
    folder = into / name
    folder.mkdir()
    for file in (GOLDEN / name).iterdir():
        if not file.name.startswith("golden."):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    return Checkpoint(folder, config, load_file(folder / "model.safetensors"))
