"""Fixtures of the tests of bundles."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

GoldenBundle = Callable[[str], Path]


@pytest.fixture
def copied(golden_bundle: GoldenBundle, tmp_path: Path) -> Path:
    """A bundle that a test may alter."""
    return shutil.copytree(golden_bundle("dspark_vanilla"), tmp_path / "bundle")
