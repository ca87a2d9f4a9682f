"""Bundles compiled ahead of time, moved, and stripped of what they were compiled from: where it can be done."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from dspark.providers import Choice, OnnxRuntimeProvider, ProviderError
from dspark.runtime import Completion, DSparkInference, SamplingParams, SpeculationOptions
from tests.exporter.test_cli import run

pytestmark = [pytest.mark.providers, pytest.mark.slow]
GOLDEN = Path(__file__).parents[1] / "golden"
DRAFTER = GOLDEN / "dspark_vanilla"
FIXED = ("--static-chunk", "16", "--static-cache", "64", "--static-cache", "128")
CASES = sorted(json.loads((DRAFTER / "golden.json").read_text())["greedy"], key=lambda case: len(case["prompt"]))[:2]
NEW_TOKENS = 12
"""QNN's simulator takes a good part of a second for each call."""


def completions(bundle: Path, provider: str) -> list[Completion]:
    model = DSparkInference.load(bundle, provider=provider, threads=2, options=SpeculationOptions("fixed"))
    return model.generate([case["prompt"] for case in CASES], SamplingParams(max_new_tokens=NEW_TOKENS))


@pytest.mark.parametrize(
    ("provider", "form"),
    [
        ("qnn", ("--precision", "fp16", "--static", *FIXED)),
        ("openvino", ("--cache-form", "delta")),
        ("openvino", ("--cache-form", "delta", "--precision", "int8-weights")),
    ],
    ids=["qnn", "openvino", "openvino int8-weights"],
)
def test_it_runs_in_another_folder_without_its_sources(
    provider: str, form: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens and accepted drafts are those of the same graphs compiled when they are loaded."""
    try:
        Choice.parse(provider).provider.require_compiler()
    except ProviderError as error:
        pytest.skip(str(error))
    plain, compiled, moved = tmp_path / "plain", tmp_path / "compiled", tmp_path / "elsewhere" / "moved"
    export = (GOLDEN / "qwen3_target", "--drafter", DRAFTER, *form)
    assert run(monkeypatch, *export, "--output", plain) == 0
    assert run(monkeypatch, *export, "--output", compiled, "--compile", provider) == 0
    moved.parent.mkdir()
    shutil.move(compiled, moved)
    for name in ("target.onnx", "drafter.onnx", "head.onnx", "weights.bin"):
        (moved / name).unlink()
    found, expected = completions(moved, provider), completions(plain, provider)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.stats.accepted_lengths for each in found] == [each.stats.accepted_lengths for each in expected]
    assert [each.token_ids for each in found] == [case["output"][:NEW_TOKENS] for case in CASES]
    with pytest.raises(ProviderError, match=rf"target\.onnx: is gone, .* but {provider}/target"):
        DSparkInference.load(moved)


def test_the_device_that_it_was_compiled_for_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chip is refused before QNN sees the model."""
    qnn = Choice.parse("qnn:soc_model=57")
    assert isinstance(qnn.provider, OnnxRuntimeProvider)
    problem = qnn.provider.discover().problem
    if problem is not None:
        pytest.skip(problem)
    output = tmp_path / "bundle"
    export = (GOLDEN / "qwen3_target", "--precision", "fp16", "--output", output, *FIXED)
    assert run(monkeypatch, *export, "--compile", "qnn:soc_model=57") == 0
    with pytest.raises(ProviderError, match=r"built for device '.*soc_model=57', but here it is '.*soc_model=60'"):
        DSparkInference.load(output, provider="qnn:soc_model=60")
