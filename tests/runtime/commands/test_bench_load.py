"""``dspark-run bench --load``: the table, JSON and pictures, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.runtime.measuring.load_figures import LoadReport
from tests.support.command_line import Run
from tests.support.load_benchmark import ROWS

GoldenBundle = Callable[[str], Path]
PNG = b"\x89PNG\r\n\x1a\n"


def test_the_command(run: Run, tmp_path: Path, golden_bundle: GoldenBundle) -> None:
    prompts, folder = tmp_path / "prompts.jsonl", tmp_path / "load"
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    arguments = ("bench", golden_bundle("dspark_vanilla"), "--load", "--input", prompts, "--max-new-tokens", "8")
    sweep = ("--concurrency", "1,2", "--schedulers", "off, fixed:3", "--requests-per-user", "1")
    shown = run(*arguments, *sweep, "--report", folder, "--profile", "flash")
    assert shown.code == 0
    assert [line.split()[1::2][:2] for line in shown.out.splitlines() if line.startswith("│")] == [
        ["off", "1"],
        ["fixed:3", "1"],
        ["off", "2"],
        ["fixed:3", "2"],
    ]
    report = LoadReport.model_validate_json((folder / "load.json").read_text())
    assert (report.settings.schedulers, report.settings.profile) == (("off", "fixed:3"), "flash")
    for name in ("throughput.png", "verification.png"):
        assert (folder / name).read_bytes().startswith(PNG)
    found = LoadReport.model_validate_json(run(*arguments, *sweep, "--json").out)
    assert [cell.verified_tokens for cell in found.cells] == [cell.verified_tokens for cell in report.cells]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-draft-tokens", "6"), "max_draft_tokens is 6; this drafter allows 1 to 5"),
        (("--concurrency", "0"), "concurrency is 0; it must be from 1 to 1024"),
        (("--concurrency", "1,1"), "concurrency has 1 twice; each is measured once"),
        (("--profile-graph",), "--profile-graph does not go with --load"),
        (
            ("--confidence-threshold", "0.5", "--schedulers", "off, fixed"),
            "confidence_threshold belongs to scheduler 'threshold', which is not among off, fixed",
        ),
        (("--max-draft-tokens", "2", "--schedulers", "off"), "max_draft_tokens does not go with scheduler 'off'"),
        (("--concurrency", "1,x"), "--concurrency 1,x: must be whole numbers, separated by commas"),
        (("--scheduler", "off"), "--scheduler off chooses one; with --load use --schedulers"),
        (("--report", "/dev/null"), "--report /dev/null: cannot be written: /dev/null is no folder"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[str, ...], message: str, run: Run, golden_bundle: GoldenBundle
) -> None:
    result = run("bench", golden_bundle("dspark_vanilla"), "--load", *arguments)
    assert result.code == 1
    assert message in result.error


@pytest.mark.parametrize("option", ["--max-draft-tokens", "--confidence-threshold"])
def test_without_a_drafter_nothing_can_be_said_of_drafts(option: str, run: Run, golden_bundle: GoldenBundle) -> None:
    result = run("bench", golden_bundle("qwen3_target"), "--load", option, "1")
    assert (result.code, result.out) == (1, "")
    assert "needs a drafter, and this bundle has none; leave it out" in result.error


@pytest.mark.parametrize(
    ("option", "value"),
    [("--concurrency", "1"), ("--schedulers", "off"), ("--requests-per-user", "0"), ("--report", "somewhere")],
)
def test_what_only_a_load_benchmark_takes_is_refused_without_it(
    option: str, value: str, run: Run, golden_bundle: GoldenBundle
) -> None:
    result = run("bench", golden_bundle("dspark_vanilla"), option, value)
    assert (result.code, result.out, result.error) == (1, "", f"error: {option} needs --load\n")
