"""Fixtures of the tests of cost tables."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.costs import copy_without_costs

GoldenBundle = Callable[[str], Path]


@pytest.fixture
def copied(golden_bundle: GoldenBundle, tmp_path: Path) -> Path:
    """A bundle without a table."""
    return copy_without_costs(golden_bundle("dspark_vanilla"), tmp_path / "bundle")
