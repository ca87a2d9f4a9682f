"""Sequential temperature scaling, its file in the bundle, and what generation makes of it."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dspark.exporter.export import export_bundle, prepare
from dspark.runtime import Bundle, BundleError, DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.bundle.calibration import CALIBRATION, Calibration, confidence_files, confidences, read_calibration
from dspark.runtime.bundle.manifest import MANIFEST
from dspark.runtime.decoding.rounds import Round, RoundTable
from dspark.runtime.evaluation.temperature_scaling import TEMPERATURES, fit_temperatures, survival_errors
from tests.runtime.command_line import Run
from tests.runtime.golden_models import GOLDEN, PROMPTS, load

GoldenBundle = Callable[[str], Path]


@pytest.fixture
def copied(golden_bundle: GoldenBundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden_bundle("dspark_vanilla"), tmp_path / "bundle"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in PROMPTS))
    return file


def calibrated(bundle: Path, *temperatures: float, **changes: Any) -> Calibration:
    """Writes a calibration into a bundle."""
    count = len(temperatures)
    content = {
        "temperatures": temperatures,
        "rounds": 300,
        "sampling_temperatures": (0.0,),
        "survival_ece_before": (0.1,) * count,
        "survival_ece_after": (0.01,) * count,
        "files": confidence_files(Bundle.open(bundle).manifest),
    }
    calibration = Calibration.model_validate(content | changes)
    (bundle / CALIBRATION).write_text(calibration.model_dump_json())
    return calibration


# --- the fit ---


def synthetic(temperatures: NDArray[np.float64], count: int, seed: int) -> RoundTable:
    """Rounds whose honest logits were multiplied by temperatures: dividing by these again is right."""
    random = np.random.default_rng(seed)
    honest = random.normal(0.8, 1.5, (count, len(temperatures)))
    stands = random.random(honest.shape) < 1 / (1 + np.exp(-honest))
    accepted = np.logical_and.accumulate(stands, axis=1).sum(axis=1).tolist()
    rounds = [
        Round(len(temperatures), length, False, (row * temperatures).astype(np.float32))
        for length, row in zip(accepted, honest, strict=True)
    ]
    return RoundTable.of(rounds, len(temperatures), confidence=True)


@pytest.mark.parametrize("temperatures", [(1.0, 1.0, 1.0), (2.5, 0.6, 4.0), (0.3, 1.7, 1.0)])
def test_known_temperatures_are_found(temperatures: tuple[float, ...]) -> None:
    wanted = np.array(temperatures)
    table, other = (synthetic(wanted, 20_000, seed) for seed in (1, 2))
    fitted = fit_temperatures(table)
    np.testing.assert_allclose(fitted, wanted, rtol=0.15)
    assert fitted.tolist() == fit_temperatures(table).tolist()
    errors = [error for error in survival_errors(other, fitted) if error is not None]
    assert max(errors) < 0.02
    if temperatures != (1.0, 1.0, 1.0):
        raw = [error for error in survival_errors(other, np.ones(3)) if error is not None]
        assert np.mean(raw) > 3 * np.mean(errors)


def test_the_grid() -> None:
    assert (TEMPERATURES.min(), TEMPERATURES.max(), TEMPERATURES[0]) == (pytest.approx(0.1), pytest.approx(10), 1)
    assert len(set(TEMPERATURES.tolist())) == len(TEMPERATURES) == 201


@given(st.lists(st.tuples(st.integers(0, 3), st.tuples(*[st.floats(-8, 8, width=32)] * 3)), min_size=1, max_size=30))
@settings(max_examples=25)
def test_a_fit_changes_no_order_and_no_position_for_the_worse(drafts: list[tuple[int, tuple[float, ...]]]) -> None:
    rounds = [Round(3, length, False, np.array(logits, np.float32)) for length, logits in drafts]
    table = RoundTable.of(rounds, 3, confidence=True)
    assert table.confidence is not None
    fitted = fit_temperatures(table)
    scaled = confidences(table.confidence.astype(np.float64), fitted)
    for position in range(3):
        order = np.argsort(table.confidence[:, position], kind="stable")
        assert (np.diff(scaled[order, position]) >= 0).all()
        unfitted = np.where(np.arange(3) < position, fitted, 1)  # the earlier ones are fixed
        before, after = (survival_errors(table, each)[position] for each in (unfitted, fitted))
        assert before is not None
        assert after is not None
        assert after <= before


def test_a_position_that_was_never_verified_keeps_its_confidence() -> None:
    logits = np.array([5, 0, 0], np.float32)
    table = RoundTable.of([Round(1, accepted, False, logits) for accepted in (0, 1)] * 50, 3, confidence=True)
    fitted = fit_temperatures(table)
    assert fitted[1:].tolist() == [1, 1]
    assert fitted[0] == pytest.approx(10)  # half of them stand, so as unsure as can be
    assert survival_errors(table, fitted)[1:] == [None, None]


# --- the command ---


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
        ("dspark_vanilla", ["--max-new-tokens", "5000"], "prompts, row 0: the prompt's 24 tokens and max_new_tokens"),
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


# --- generation ---


def cut(logits: NDArray[np.float32], temperatures: tuple[float, ...], threshold: float) -> int:
    """The confident prefix, in Python's own numbers."""
    length = 0
    for logit, temperature in zip(logits.tolist(), temperatures, strict=True):
        if 1 / (1 + math.exp(-logit / temperature)) < threshold:
            break
        length += 1
    return length


@pytest.mark.parametrize(
    "temperatures", [(1.0,) * 5, (0.1, 0.2, 0.5, 0.5, 0.5), (10.0,) * 5, (2.0, 0.1, 3.0, 1.0, 1.0)]
)
def test_generation_uses_it(temperatures: tuple[float, ...], copied: Path) -> None:
    calibrated(copied, *temperatures)
    model = load(copied, batch_size=2, options=SpeculationOptions(confidence_threshold=0.6))
    requests = [model.request(prompt, SamplingParams(max_new_tokens=40)) for prompt in PROMPTS]
    model.run(requests)
    golden = np.load(GOLDEN / "dspark_vanilla" / "golden.npz")
    plain = load(copied, options=SpeculationOptions("off"))
    for index, request in enumerate(requests):
        assert request.rounds[0].verified == cut(golden[f"{index}.confidence_logits"], temperatures, 0.6)
        for item in request.rounds:
            assert item.confidence is not None
            assert item.verified == cut(item.confidence, temperatures, 0.6)
        assert request.output_ids == plain.generate([PROMPTS[index]], SamplingParams(max_new_tokens=40))[0].token_ids


def test_temperatures_change_what_is_verified(copied: Path) -> None:
    options, params = SpeculationOptions(confidence_threshold=0.6), SamplingParams(max_new_tokens=40)
    verified = []
    for temperature in (None, 0.1, 10.0):
        if temperature is not None:
            calibrated(copied, *[temperature] * 5)
        completion = load(copied, options=options).generate([PROMPTS[0]], params)[0]
        verified.append(np.mean(completion.stats.draft_lengths))
    assert verified[1] > verified[0] > verified[2]


def test_inspect_tells(run: Run, copied: Path) -> None:
    assert cell(run("inspect", copied).out, "calibration") == "none"
    calibrated(copied, 1.0, 1.0, 1.0, 1.0, 1.0, rounds=12345)
    shown = cell(run("inspect", copied).out, "calibration")
    assert shown == "fitted to 12,345 drafts, survival ECE 10.0% before, 1.0% after"


def cell(output: str, name: str) -> str:
    """The value beside a name in a table."""
    (line,) = [line for line in output.splitlines() if name in line]
    return line.split("│")[2].strip()


# --- the file ---


def altered(content: str, **changes: Any) -> str:
    return json.dumps(json.loads(content) | changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda _: "", "the file: Invalid JSON"),
        (lambda text: text[: len(text) // 2], "the file: Invalid JSON"),
        (lambda _: "[]", "the file: Input should be an object"),
        (lambda text: text.replace("{", '{"rounds": 3,', 1), "key 'rounds' stands there twice"),
        (lambda text: altered(text, schema_version=2), "schema version 2; this runtime reads version 1"),
        (lambda text: altered(text, temperatures=[1.0] * 4), "temperatures has 4 values; the drafter has 5 positions"),
        (lambda text: altered(text, survival_ece_after=[]), "survival_ece_after has 0 values"),
        (lambda text: altered(text, temperatures=[1.0, 1.0, 1.0, 1.0, 0.0]), "temperatures.4: Input should be greater"),
        (lambda text: altered(text, temperatures=[1.0, math.inf, 1.0, 1.0, 1.0]), "temperatures.1: Input should be a"),
        (lambda text: altered(text, rounds="many"), "rounds: Input should be a valid integer"),
        (lambda text: altered(text, extra=1), "extra: Extra inputs are not permitted"),
        (lambda text: altered(text, files={}), "was made for another bundle, where draft"),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[str], str], message: str, run: Run, copied: Path) -> None:
    calibrated(copied, 1.0, 1.0, 1.0, 1.0, 1.0)
    file = copied / CALIBRATION
    file.write_text(damage(file.read_text()))
    with pytest.raises(BundleError) as raised:
        DSparkInference.load(copied, threads=1)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{file}: ")
    assert str(raised.value).endswith("; calibrate again with dspark-run calibrate, or delete the file")
    for command in (["generate", "--prompt", "x"], ["inspect"], ["bench"]):
        result = run(command[0], copied, *command[1:])
        assert (result.code, result.error) == (1, f"error: {raised.value}\n")


def test_another_bundles_is_refused(copied: Path, golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    calibrated(copied, 1.0, 1.0, 1.0, 1.0, 1.0)
    other = Path(shutil.copytree(golden_bundle("dspark_gated"), tmp_path / "other"))
    shutil.copy(copied / CALIBRATION, other)
    with pytest.raises(BundleError) as raised:
        load(other)
    here, there = (json.loads((bundle / MANIFEST).read_text())["files"] for bundle in (other, copied))
    differing = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    assert f"where {differing[0]} has SHA-256 {there[differing[0]]['sha256']}; here it is" in str(raised.value)
    assert here[differing[0]]["sha256"] in str(raised.value)


def test_another_tokenizer_changes_nothing(copied: Path) -> None:
    """Confidences do not depend on text."""
    expected = calibrated(copied, 2.0, 1.0, 1.0, 1.0, 1.0)
    opened = Bundle.open(copied)
    assert "tokenizer.json" in opened.manifest.files
    files = {name: info for name, info in opened.manifest.files.items() if name != "tokenizer.json"}
    text = opened.manifest.text.model_copy(update={"tokenizer": None})
    manifest = opened.manifest.model_copy(update={"files": files, "text": text})
    assert read_calibration(Bundle(copied, manifest)) == expected


def test_a_new_export_is_not_calibrated(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    export_bundle(prepare(GOLDEN / "qwen3_target", GOLDEN / "dspark_vanilla", output))
    calibrated(output, 2.0, 1.0, 1.0, 1.0, 1.0)
    export_bundle(prepare(GOLDEN / "qwen3_target", GOLDEN / "dspark_vanilla", output, force=True))
    assert read_calibration(Bundle.open(output)) is None
