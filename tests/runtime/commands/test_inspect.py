"""``dspark-run inspect``."""

import json
from pathlib import Path

import pytest

from tests.runtime.commands.support import GoldenBundle
from tests.support.command_line import Run


def test_inspect(run: Run, golden_bundle: GoldenBundle) -> None:
    for name in ("qwen3_target", "dspark_gated", "eagle3"):
        result = run("inspect", golden_bundle(name))
        assert result.code == 0
        described = ["qwen3_target (qwen3)", "512 tokens", "weights.bin", "129"]
        described += ["No drafter"] if name == "qwen3_target" else [name]
        for text in described:
            assert text in result.out
        manifest = json.loads((golden_bundle(name) / "manifest.json").read_text())
        assert json.loads(run("inspect", golden_bundle(name), "--json").out) == {**manifest, "engines": []}


@pytest.mark.parametrize(("option", "value"), [("--provider", "cpu"), ("--threads", "1")])
def test_inspect_refuses_what_only_the_placement_takes(option: str, value: str, run: Run, vanilla: Path) -> None:
    result = run("inspect", vanilla, option, value)
    assert (result.code, result.out, result.error) == (1, "", f"error: {option} needs --placement\n")
