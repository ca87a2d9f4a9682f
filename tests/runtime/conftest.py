"""Fixtures of the runtime's tests."""

import json
from pathlib import Path

import pytest

from tests.support.command_line import Run, runner
from tests.support.golden_models import PROMPTS


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``dspark-run``."""
    return runner(monkeypatch, capsys)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of the golden prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in PROMPTS))
    return file
