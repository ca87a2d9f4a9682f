"""Bundles that were altered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark.runtime.bundle.manifest import MANIFEST

__all__ = ["VOCABULARY", "edit", "flip", "void"]

VOCABULARY = "draft_vocabulary.npy"


def edit(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    change(manifest)
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)


def void(_: object) -> None:
    """Takes what methods of dictionaries return."""
