"""What all commands of ``dspark-run`` share: errors, help, and how a process ends."""

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.runtime.commands.support import COMMAND, GoldenBundle, jsonl
from tests.support.command_line import Run
from tests.support.golden_models import ids


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--max-draft-tokens", "2", "max_draft_tokens"),
        ("--confidence-threshold", "0.3", "confidence_threshold"),
        ("--scheduler", "fixed", "scheduler 'fixed'"),
    ],
)
def test_without_a_drafter_nothing_can_be_said_of_drafts(
    option: str, value: str, name: str, run: Run, chat_bundle: GoldenBundle
) -> None:
    """But by a serving profile, which many bundles share."""
    bundle = chat_bundle("qwen3_target")
    for command in (["generate", "--prompt", "x"], ["chat"], ["bench"], ["bench", "--profile-graph"]):
        result = run(command[0], bundle, *command[1:], option, value)
        assert (result.code, result.out.strip()) == (1, "")
        advice = "leave the scheduler (--scheduler) out, which works with every bundle"
        advice = advice if option == "--scheduler" else "leave it out"
        assert result.error == f"error: {bundle}: {name} needs a drafter, and this bundle has none; {advice}\n"
    arguments = ["--prompt", "tead ", "--raw", "--profile", "flash", "--max-new-tokens", "6"]
    assert run("generate", bundle, *arguments).out == "in the\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--scheduler", "sideways", "'threshold', 'fixed', 'off'"),
        ("--top-k", "many", "integer"),
        ("--max-new-token", "3", "--max-new-tokens"),
    ],
)
def test_what_is_no_option_is_explained(option: str, value: str, message: str, run: Run, vanilla: Path) -> None:
    result = run("generate", vanilla, "--prompt", "x", option, value)
    assert result.code == 2
    assert option in result.error
    assert message in result.error


@pytest.mark.parametrize("arguments", [["generate", "--prompt", "x"], ["chat"], ["inspect"], ["bench"]])
def test_no_bundle_is_exit_code_1(arguments: list[str], run: Run, tmp_path: Path) -> None:
    result = run(arguments[0], tmp_path, *arguments[1:])
    assert (result.code, result.out) == (1, "")
    assert result.error.endswith("no bundle here (manifest.json is missing); make one with dspark-export\n")


def test_help(run: Run) -> None:
    listed = run("--help")
    assert listed.code == 0
    for command in ("generate", "chat", "inspect", "bench", "profile", "evaluate", "calibrate"):
        assert command in listed.out
        assert run(command, "--help").code == 0


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_ends_generate_with_130(vanilla: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(jsonl(*[{"prompt_ids": ids("tead "), "max_new_tokens": 500}] * 500))
    command = [*COMMAND, "generate", str(vanilla), "--input", str(file), "--batch-size", "1"]
    listens = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=listens) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"i"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in error


def test_a_reader_that_goes_away_ends_it_quietly(vanilla: Path) -> None:
    stdin = jsonl(*[{"prompt_ids": ids("tead "), "max_new_tokens": 100}] * 20).encode()
    command = [*COMMAND, "generate", str(vanilla), "--input", "-", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(stdin)
        process.stdin.close()
        assert json.loads(process.stdout.readline())["index"] == 0
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode != 0
