"""Golden checkpoints, and copies of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.exporter.checkpoints import read_target
from dspark.exporter.checkpoints.description import Target
from tests.exporter.checkpoints.editing import GOLDEN, Checkpoint, copy_of


@pytest.fixture
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def target() -> Target:
    """The target of all golden drafters: 8 layers, hidden size 64, a vocabulary of 160."""
    return read_target(GOLDEN / "qwen3_target")


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Checkpoint]:
    """Copies a golden checkpoint for editing."""
    return lambda name: copy_of(name, tmp_path)
