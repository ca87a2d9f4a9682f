"""``dspark-run calibrate``: what it writes, and what ``inspect`` tells of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dspark.runtime import Bundle, SamplingParams
from dspark.runtime.bundle.calibration import CALIBRATION, Calibration, read_calibration
from dspark.runtime.bundle.manifest import MANIFEST
from dspark.runtime.decoding.rounds import RoundTable
from dspark.runtime.evaluation.temperature_scaling import fit_temperatures, survival_errors
from tests.support.calibration import calibrated
from tests.support.command_line import Run
from tests.support.golden_models import PROMPTS, load

GoldenBundle = Callable[[str], Path]


@pytest.fixture
def copied(golden_bundle: GoldenBundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden_bundle("dspark_vanilla"), tmp_path / "bundle"))


def test_calibrate_writes_what_it_prints(run: Run, copied: Path, prompts: Path) -> None:
    arguments = ["calibrate", copied, "--input", prompts, "--max-new-tokens", "150"]
    result = run(*arguments, "--json")
    assert (result.code, result.error) == (0, "")
    calibration = Calibration.model_validate_json(result.out)
    assert calibration == read_calibration(Bundle.open(copied, check_hashes=True))
    assert len(calibration.temperatures) == 5
    assert calibration.sampling_temperatures == (0, 1)
    before, after = calibration.mean_survival_ece
    assert after < before
    others = {file.name for file in copied.iterdir() if file.is_file()} - set(Bundle.open(copied).manifest.files)
    assert others == {MANIFEST, CALIBRATION}
    shown = run(*arguments)
    assert f"Calibration, fitted to {calibration.rounds:,} drafts" in shown.out
    for text in (f"{calibration.temperatures[0]:.3f}", f"{before:.2%}", f"{after:.2%}"):
        assert text in shown.out


def test_calibrate_fits_the_rounds_that_generation_makes(run: Run, copied: Path, prompts: Path) -> None:
    arguments = ["--max-new-tokens", "150", "--temperature", "0", "--temperature", "0.8", "--seed", "3"]
    found = json.loads(run("calibrate", copied, "--input", prompts, *arguments, "--json").out)
    (copied / CALIBRATION).unlink()
    model = load(copied, batch_size=5)
    requests = [
        model.request(prompt, SamplingParams(max_new_tokens=150, temperature=temperature, seed=seed + index))
        for temperature, seed in ((0.0, 3), (0.8, 8))
        for index, prompt in enumerate(PROMPTS)
    ]
    model.run(requests)
    table = RoundTable.of([item for request in requests for item in request.rounds], 5, confidence=True)
    assert found["rounds"] == len(table)
    np.testing.assert_allclose(found["survival_ece_before"], np.array(survival_errors(table, np.ones(5)), float))
    assert found["temperatures"] == fit_temperatures(table).tolist()


def test_calibrate_again(run: Run, copied: Path, prompts: Path) -> None:
    """What is there, even if it is damaged, does not count."""
    arguments = ["calibrate", copied, "--input", prompts, "--max-new-tokens", "150", "--json"]
    first = run(*arguments).out
    assert run(*arguments).out == first
    (copied / CALIBRATION).write_text("{")
    assert run(*arguments).out == first


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("dspark_vanilla", ["--max-new-tokens", "40"], "drafts; calibration needs at least 200, better thousands"),
        ("dspark_vanilla", ["--max-new-tokens", "8"], f"these prompts give at most {2 * 6 * len(PROMPTS)} drafts; cal"),
        ("dspark_vanilla", ["--samples", "0"], "samples is 0; it must be at least 1"),
        ("dspark_vanilla", ["--temperature", "-1"], "temperature = -1.0: must be greater than or equal to 0"),
        ("dspark_vanilla", ["--batch-size", "0"], "batch_size is 0; it must be from 1 to"),
        ("dspark_vanilla", ["--max-new-tokens", "5000"], "max_new_tokens is 5000; the limit is 512 with the prompt"),
        ("dspark_vanilla", ["--max-new-tokens", "500"], "prompts, row 0: the prompt's 24 tokens and max_new_tokens"),
        ("dspark_vanilla", ["--input", "/no/such/file.jsonl"], "/no/such/file.jsonl: cannot be read"),
        ("dflash", [], "has no confidence head, so there is nothing to calibrate"),
        ("eagle3", [], "has no confidence head, so there is nothing to calibrate"),
        ("qwen3_target", [], "has no confidence head, so there is nothing to calibrate"),
    ],
)
def test_calibrate_refuses(
    name: str, arguments: list[str], message: str, run: Run, golden_bundle: GoldenBundle, prompts: Path
) -> None:
    bundle = golden_bundle(name)
    before = sorted(bundle.iterdir())
    result = run("calibrate", bundle, "--input", prompts, *arguments)
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith("error: ")
    assert message in result.error
    assert sorted(bundle.iterdir()) == before


def test_calibrate_chooses_the_temperature(run: Run, copied: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt_ids": PROMPTS[0], "temperature": 0.5}))
    result = run("calibrate", copied, "--input", file)
    assert result.code == 1
    assert "rows, row 0: has its own temperature; give --temperature instead" in result.error


def test_inspect_tells(run: Run, copied: Path) -> None:
    assert cell(run("inspect", copied).out, "calibration") == "none"
    calibrated(copied, 1.0, 1.0, 1.0, 1.0, 1.0, rounds=12345)
    shown = cell(run("inspect", copied).out, "calibration")
    assert shown == "fitted to 12,345 drafts, survival ECE 10.0% before, 1.0% after"


def cell(output: str, name: str) -> str:
    """The value beside a name in a table."""
    (line,) = [line for line in output.splitlines() if name in line]
    return line.split("│")[2].strip()
