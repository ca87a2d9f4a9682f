"""Fixtures of the commands' tests."""

from pathlib import Path

import pytest

from tests.runtime.commands.support import GoldenBundle


@pytest.fixture
def vanilla(golden_bundle: GoldenBundle) -> Path:
    return golden_bundle("dspark_vanilla")
