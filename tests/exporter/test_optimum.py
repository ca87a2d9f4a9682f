"""``optimum-cli export dspark``, where Optimum is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from dspark.runtime import Bundle

pytest.importorskip("optimum.commands.optimum_cli", reason="Optimum is not installed")
TARGET = Path(__file__).parents[1] / "golden" / "qwen3_target"


def optimum_cli(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "dspark", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_exports(tmp_path: Path) -> None:
    """With options before and after the model."""
    done = optimum_cli("--cache-form", "delta", TARGET, "--output", tmp_path / "bundle")
    assert done.returncode == 0, done.stderr
    assert Bundle.open(tmp_path / "bundle").manifest.cache_form == "delta"


def test_errors_and_help_are_those_of_dspark_export(tmp_path: Path) -> None:
    failed = optimum_cli(tmp_path / "nothing", "--output", tmp_path / "bundle")
    assert failed.returncode == 1
    assert f"error: {tmp_path / 'nothing'}" in failed.stderr
    assert "--draft-vocabulary" in optimum_cli("--help").stdout
