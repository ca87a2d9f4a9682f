"""``dspark-run evaluate``: its tables, and what is refused."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.runtime import Bundle, SamplingParams, SpeculationOptions
from dspark.runtime.bundle.calibration import CALIBRATION
from dspark.runtime.evaluation.evaluator import Evaluation
from dspark.runtime.evaluation.tables import evaluation_tables
from tests.support.command_line import Run
from tests.support.golden_models import PROMPTS, load
from tests.support.reference_rounds import DATASETS, dataset_files, recounted, reference_rounds
from tests.support.table_cells import table_cells

GoldenBundle = Callable[[str], Path]


# --- output ---


def test_tables(run: Run, golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    files = dataset_files(tmp_path, "dspark_vanilla")
    arguments = ["evaluate", golden_bundle("dspark_vanilla"), "--input", files[0], "--input", files[1]]
    result = run(*arguments)
    assert (result.code, result.error) == (0, "")
    for text in ("first", "last", "macro average", "ROC-AUC", "survival ECE, raw", "acceptance length", "0.95"):
        assert text in result.out
    expected = recounted(
        [pair for index in DATASETS["first"] for pair in reference_rounds("dspark_vanilla", "greedy", index)]
    )
    assert f"{expected['accepted']} of {expected['verified']}" in result.out
    alone = run("evaluate", golden_bundle("eagle3"), "--input", files[0], "--max-new-tokens", "9").out
    assert "macro average" not in alone
    assert "ROC-AUC" not in alone


def test_tables_at_80_columns(run: Run, golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    """Confidence by position has many columns; speeds differ from run to run."""
    files = dataset_files(tmp_path, "dspark_vanilla")
    arguments = ["evaluate", golden_bundle("dspark_vanilla"), "--input", files[0], "--input", files[1]]
    evaluation = Evaluation.model_validate_json(run(*arguments, "--json").out)
    shown = run(*arguments, columns=80).out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    found = table_cells(shown)
    for table in evaluation_tables(evaluation):
        for row in table.rows:
            for head, cell in zip(table.columns[1:], row[1:], strict=True):
                assert (row[0], head) in found
                if table.title in ("Acceptance", "Confidence by position, all datasets together"):
                    assert found[row[0], head] == cell


# --- refusals ---


def test_matplotlib_is_asked_for_before_any_work(
    run: Run, golden_bundle: GoldenBundle, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(Bundle, "open", lambda *_, **__: pytest.fail("work was begun"))
    arguments = ["evaluate", golden_bundle("eagle3"), "--input", prompts]
    result = run(*arguments, "--report", tmp_path / "report")
    assert (result.code, result.out) == (1, "")
    assert result.error == "error: --report needs matplotlib: pip install 'dspark-onnx[report]'\n"
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("qwen3_target", [], "has no drafter, so there is nothing to evaluate"),
        ("eagle3", ["--scheduler", "off"], "scheduler 'off' does not draft"),
        ("eagle3", ["--scheduler", "threshold"], "scheduler 'threshold' needs a confidence head"),
        ("eagle3", ["--max-draft-tokens", "6"], "max_draft_tokens is 6; this drafter allows 1 to 5"),
        ("eagle3", ["--max-new-tokens", "2"], "max_new_tokens is 2; to draft at all takes 3"),
        ("eagle3", ["--max-new-tokens", "600"], "max_new_tokens is 600; the limit is 512 with the prompt"),
        ("eagle3", ["--max-new-tokens", "500"], "prompts, row 0: the prompt's 24 tokens and max_new_tokens 500"),
        ("eagle3", ["--samples", "0"], "samples is 0; it must be at least 1"),
        ("eagle3", ["--seed", "-1"], "seed = -1: must be greater than or equal to 0"),
        ("eagle3", ["--temperature", "-1"], "temperature = -1.0: must be greater than or equal to 0"),
        ("eagle3", ["--batch-size", "0"], "batch_size is 0; it must be from 1 to"),
        ("eagle3", ["--threads", "9999"], "threads is 9999"),
        ("eagle3", ["--input", "/no/such/file.jsonl"], "/no/such/file.jsonl: cannot be read"),
        ("eagle3", ["/no/such/file.jsonl"], "/no/such/file.jsonl: cannot be read"),
        ("eagle3", ["--input", "sub/prompts.jsonl"], "there is another file named 'prompts'; a file's name is its"),
        ("eagle3", ["--input", "empty.jsonl"], "empty.jsonl: has no rows"),
        ("eagle3", ["--input", "damaged.jsonl"], "damaged.jsonl: line 2 is not JSON"),
        ("eagle3", ["--input", "wrong.jsonl"], "wrong, row 1: a row must have exactly one of prompt"),
        ("eagle3", ["--report", "empty.jsonl"], "--report empty.jsonl: "),
        (
            "eagle3",
            ["--report", "empty.jsonl/report"],
            ": cannot be written: empty.jsonl is no folder",
        ),
    ],
)
def test_evaluate_refuses(
    name: str,
    arguments: list[str],
    message: str,
    run: Run,
    golden_bundle: GoldenBundle,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--report" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    shutil.copy(prompts, tmp_path / "sub")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "damaged.jsonl").write_text('{"prompt": "x"}\n{')
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "x"}\n{"text": "x"}')
    before = sorted(tmp_path.rglob("*"))
    result = run("evaluate", golden_bundle(name), "--input", prompts, *arguments)
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith("error: ")
    assert message in result.error
    assert result.error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_calibration_is_refused(run: Run, golden_bundle: GoldenBundle, prompts: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(golden_bundle("dspark_vanilla"), tmp_path / "bundle"))
    (bundle / CALIBRATION).write_text("{")
    result = run("evaluate", bundle, "--input", prompts)
    assert (result.code, result.out) == (1, "")
    assert "calibration.json: the file: Invalid JSON" in result.error


def test_evaluate_does_not_touch_the_bundle(run: Run, golden_bundle: GoldenBundle, prompts: Path) -> None:
    bundle = golden_bundle("dspark_vanilla")
    before = {file.name: file.stat().st_mtime_ns for file in bundle.iterdir()}
    assert run("evaluate", bundle, "--input", prompts, "--samples", "1", "--max-new-tokens", "5").code == 0
    assert {file.name: file.stat().st_mtime_ns for file in bundle.iterdir()} == before


def test_speculation_is_as_in_generation(run: Run, golden_bundle: GoldenBundle, prompts: Path) -> None:
    bundle = golden_bundle("dspark_vanilla")
    arguments = ["--max-draft-tokens", "2", "--max-new-tokens", "30", "--json"]
    counts = json.loads(run("evaluate", bundle, "--input", prompts, *arguments).out)["pooled"]["counts"]
    model = load(bundle, options=SpeculationOptions("fixed", max_draft_tokens=2))
    stats = [each.stats for each in model.generate(PROMPTS, SamplingParams(max_new_tokens=30))]
    assert counts["verified"] == sum(sum(each.draft_lengths) for each in stats)
    assert counts["reached"][2:] == [0, 0, 0]
