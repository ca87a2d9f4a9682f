"""The command line of the exporter."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark.exporter.cli import app, main
from dspark.runtime import Bundle

GOLDEN = Path(__file__).parent.parent / "golden"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Runs the command as the shell would; returns its exit code."""
    monkeypatch.setattr("sys.argv", ["dspark-export", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_writes_a_bundle_and_says_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "bundle"
    assert run(monkeypatch, GOLDEN / "qwen3_target", "--drafter", GOLDEN / "dspark_gated", "--output", output) == 0
    printed = capsys.readouterr().out
    for name in Bundle.open(output).manifest.files:
        assert name in printed
    assert "total" in printed


def test_says_what_a_user_should_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(GOLDEN / "llama_target", tmp_path / "target")
    (target / "tokenizer.json").unlink()
    assert run(monkeypatch, target, "--output", tmp_path / "bundle") == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        f"note: {target} has no tokenizer.json: the bundle takes token ids, no text",
        "note: texts end at 129 (eos_token_id of the configuration)",
    ]
    assert "note" not in printed.out


def test_refuses_an_output_that_exists_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (GOLDEN / "llama_target", "--output", tmp_path / "bundle")
    assert run(monkeypatch, *arguments) == 0
    capsys.readouterr()
    assert run(monkeypatch, *arguments) == 1
    assert "--force" in capsys.readouterr().err
    assert run(monkeypatch, *arguments, "--force") == 0


def test_a_bad_drafter_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(GOLDEN / "dspark_vanilla", drafter)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "target_layer_ids": [0, 2, 4, 7]}))
    output = tmp_path / "outputs" / "bundle"
    assert run(monkeypatch, GOLDEN / "qwen3_target", "--drafter", drafter, "--output", output) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    assert "7" in error
    assert not output.parent.exists()


def test_unknown_precision_is_refused() -> None:
    result = CliRunner().invoke(app, [str(GOLDEN / "llama_target"), "--output", "unused", "--precision", "fp4"])
    assert result.exit_code != 0
    assert "fp32" in result.output
