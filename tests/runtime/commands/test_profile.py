"""``dspark-run profile``: the table and the picture that it writes, and what is refused before anything is measured."""

import re
from pathlib import Path

import pytest

from dspark.runtime import Bundle
from dspark.runtime.costs.store import COST_FOLDER, cost_file, read_costs
from dspark.runtime.costs.table import CostTable
from dspark.runtime.reports import pictures
from tests.runtime.commands.support import GoldenBundle
from tests.support.command_line import Run
from tests.support.costs import copy_without_costs, key_of


@pytest.fixture
def copied(vanilla: Path, tmp_path: Path) -> Path:
    """A bundle without a table."""
    return copy_without_costs(vanilla, tmp_path / "bundle")


def test_profile_writes_a_table_and_a_picture(run: Run, copied: Path) -> None:
    result = run("profile", copied, "--max-requests", "2", "--repeats", "2")
    assert (result.code, result.error) == (0, "")
    bundle, key = Bundle.open(copied), key_of(copied)
    table, file = read_costs(bundle, key), cost_file(bundle, key)
    assert table is not None
    assert {(curve.requests, curve.context_length) for curve in table.curves} == {(1, 128), (2, 128), (1, 512)}
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert f"Written: {file}, and a picture beside it" in result.out
    for text in ("Steps", "Drafts", "outliers"):
        assert text in result.out
    generated = run("generate", copied, "--prompt", "the ", "--batch-size", "2")
    assert (generated.code, generated.error) == (0, "")


def test_profile_without_matplotlib(run: Run, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    result = run("profile", copied, "--max-requests", "1", "--repeats", "1")
    assert "no picture: pip install 'dspark-onnx[report]'" in result.out
    assert [file.suffix for file in (copied / COST_FOLDER).iterdir()] == [".json"]
    shown = run("profile", copied, "--max-requests", "1", "--repeats", "1", "--json")
    assert CostTable.model_validate_json(shown.out) == read_costs(Bundle.open(copied), key_of(copied))


def test_what_cannot_be_profiled(run: Run, copied: Path, golden_bundle: GoldenBundle) -> None:
    for arguments, message in (
        ([copied, "--max-requests", "0"], "max_requests is 0; it must be from 1 to 1024"),
        ([copied, "--repeats", "0"], "repeats is 0; it must be at least 1"),
        ([golden_bundle("qwen3_target")], "has no drafter, so there is nothing to schedule"),
    ):
        result = run("profile", *arguments)
        assert (result.code, result.out) == (1, "")
        assert message in result.error


def test_where_nothing_can_be_written_nothing_is_measured(
    run: Run, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / COST_FOLDER).write_text("in the way")
    monkeypatch.setattr("dspark.runtime.costs.measure.measure", lambda *_: pytest.fail("measured in vain"))
    result = run("profile", copied)
    assert (result.code, result.out) == (1, "")
    assert re.fullmatch(rf"error: {copied / COST_FOLDER}: cannot be written: .+; nothing was measured\n", result.error)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_what_was_measured_is_shown_even_if_it_cannot_be_kept(
    flags: list[str], run: Run, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("dspark.runtime.costs.store.write_whole", full)
    result = run("profile", copied, "--max-requests", "1", "--repeats", "1", *flags)
    assert (result.code, result.error) == (1, "error: the output cannot be written: No space left on device\n")
    assert ("max_batch_tokens" if flags else "Drafts") in result.out
