"""A calibration's file in the bundle, and what generation makes of it."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark.exporter.export import export_bundle, prepare
from dspark.runtime import Bundle, BundleError, DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.bundle.calibration import CALIBRATION, read_calibration
from dspark.runtime.bundle.manifest import MANIFEST
from tests.support.calibration import calibrated
from tests.support.command_line import Run
from tests.support.golden_models import GOLDEN, PROMPTS, load

GoldenBundle = Callable[[str], Path]


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
