"""Fixtures of the runtime's tests."""

import pytest

from tests.support.command_line import Run, runner


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``dspark-run``."""
    return runner(monkeypatch, capsys)
