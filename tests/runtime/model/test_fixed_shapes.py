"""Bundles of fixed shapes: same output, few shapes, and none that the bundle does not name."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.exporter.errors import ExportError
from dspark.exporter.export import Static, export_bundle, prepare
from dspark.providers import ON_CPU, Choice, ProviderError, Selection, Session, find_provider
from dspark.runtime import Bundle, DSparkInference, RequestError, SamplingParams, SpeculationOptions
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.model.fixed_shapes import FixedShapeSession, graph_dimensions
from tests.support.command_line import runner
from tests.support.golden_models import GOLDEN

DRAFTERS = ["dspark_vanilla", "dspark_gated", "dflash", "speculators_dspark", "eagle3"]
LADDER = (32, 64, 128)
FIXED = Selection((Choice(replace(find_provider("cpu"), name="fixed", static_shapes=True)),))
"""The CPU provider as one that takes fixed shapes only."""
FixedBundle = Callable[..., Path]


@pytest.fixture(scope="module")
def fixed_bundle(tmp_path_factory: pytest.TempPathFactory) -> FixedBundle:
    root = tmp_path_factory.mktemp("fixed")

    def bundle(name: str, batch: int = 1) -> Path:
        output = root / f"{name}-{batch}"
        if not output.exists():
            static = Static(batch, 16, LADDER)
            drafter = None if name == "qwen3_target" else GOLDEN / name
            export_bundle(prepare(GOLDEN / "qwen3_target", drafter, output, cache_form="delta", static=static))
        return output

    return bundle


def cases(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / name / "golden.json").read_text())["greedy"]
    return found


def load(path: Path, batch_size: int, selection: Selection = FIXED) -> tuple[DSparkInference, Mapping[str, Session]]:
    bundle = Bundle.open(path)
    sessions = open_sessions(bundle, HostOptions(selection, threads=1), list(bundle.manifest.precision))
    options = SpeculationOptions("off" if bundle.manifest.drafter is None else "fixed")
    return DSparkInference(LoadedModel(bundle, sessions), ServingOptions(options, batch_size)), sessions


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", [*DRAFTERS, "qwen3_target"])
def test_output_equals_that_of_any_shapes(name: str, batch: int, fixed_bundle: FixedBundle) -> None:
    model, sessions = load(fixed_bundle(name, batch), batch)
    expected = cases(name)
    found = model.generate([case["prompt"] for case in expected], SamplingParams(max_new_tokens=64))
    assert [completion.token_ids for completion in found] == [case["output"] for case in expected]
    for completion, case in zip(found, expected, strict=True):
        if name != "qwen3_target":
            whole = completion.stats.rounds - 1  # the last round may be cut
            assert completion.stats.accepted_lengths[:whole] == case["accepted_draft_lengths"][:whole]
    for graph, session in sessions.items():
        assert isinstance(session, FixedShapeSession)
        assert session.loaded <= len(graph_dimensions(model.bundle.manifest, graph))


def test_shapes_are_loaded_when_they_are_needed_and_told(
    fixed_bundle: FixedBundle, caplog: pytest.LogCaptureFixture
) -> None:
    """A text moves up the ladder; after that no length loads anything again."""
    caplog.set_level(logging.INFO)
    model, sessions = load(fixed_bundle("dspark_vanilla"), 1)

    def loaded() -> dict[str, int]:
        return {graph: session.loaded for graph, session in sessions.items() if isinstance(session, FixedShapeSession)}

    assert loaded() == {"target": 2, "drafter": 1, "head": 1}
    prompt = cases("dspark_vanilla")[0]["prompt"][:8]
    # A prompt is computed in the cache that the text before it left behind.
    for new_tokens, target, drafter in ((8, 2, 1), (50, 3, 2), (110, 5, 3), (8, 6, 3)):
        model.generate([prompt], SamplingParams(max_new_tokens=new_tokens))
        assert loaded() == {"target": target, "drafter": drafter, "head": 1}
    caplog.clear()
    for length in range(1, 100, 7):
        model.generate([(prompt * 13)[:length]], SamplingParams(max_new_tokens=5))
    assert not caplog.messages
    model, _ = load(fixed_bundle("dspark_vanilla"), 1)
    assert "target: loading shape 2 of at most 6 (B = 1, T = 6, S = 32, S+T = 38, N = 6, K = 6)" in caplog.messages


def test_sampling_and_streams_are_the_same(fixed_bundle: FixedBundle, golden_bundle: Callable[[str], Path]) -> None:
    params = [SamplingParams(max_new_tokens=24, temperature=0.8, seed=seed) for seed in range(3)]
    prompts = [case["prompt"] for case in cases("dspark_gated")][:3]
    fixed, _ = load(fixed_bundle("dspark_gated", 3), 2)  # fewer requests than the batch
    free, _ = load(golden_bundle("dspark_gated"), 2, ON_CPU)
    assert [each.token_ids for each in fixed.generate(prompts, params)] == [
        each.token_ids for each in free.generate(prompts, params)
    ]


def test_more_requests_than_the_shapes_are_for_are_refused(fixed_bundle: FixedBundle) -> None:
    path = fixed_bundle("dspark_vanilla", 3)
    with pytest.raises(RequestError, match="batch_size is 4; it must be from 1 to 3, which the bundle's fixed shapes"):
        DSparkInference.load(path, threads=1, batch_size=4)
    DSparkInference.load(path, threads=1, profile="pro")  # shared by many bundles


def test_a_bundle_of_fixed_shapes_runs_on_providers_that_take_any(fixed_bundle: FixedBundle) -> None:
    model = DSparkInference.load(fixed_bundle("eagle3", 3), threads=1, batch_size=3)
    expected = cases("eagle3")
    found = model.generate([case["prompt"] for case in expected], SamplingParams(max_new_tokens=64))
    assert [completion.token_ids for completion in found] == [case["output"] for case in expected]


def test_a_text_longer_than_the_longest_cache_is_refused_before_any_work(fixed_bundle: FixedBundle) -> None:
    model = DSparkInference.load(fixed_bundle("dspark_vanilla"), threads=1)
    with pytest.raises(RequestError, match=r"100 tokens and max_new_tokens 29 make 129; the limit is 128"):
        model.generate([[100] * 100], SamplingParams(max_new_tokens=29))
    with pytest.raises(RequestError, match=r"max_sequence_length is 129; this bundle allows 2 to 128"):
        DSparkInference.load(fixed_bundle("dspark_vanilla"), threads=1, max_sequence_length=129)


def test_arrays_of_another_shape_are_refused_with_the_possible_ones(fixed_bundle: FixedBundle) -> None:
    _, sessions = load(fixed_bundle("dspark_vanilla"), 1)
    with pytest.raises(ProviderError, match=r"the head graph was made for fixed shapes \(B = 1\), not for B = 2"):
        sessions["head"].bind({"anchor_ids": np.zeros(2, np.int64)}, {})


def test_what_cannot_be_compiled_shows_when_it_is_loaded() -> None:
    def fail(dimensions: Mapping[str, int]) -> Session:
        raise ProviderError("no")

    with pytest.raises(ProviderError, match="no"):
        FixedShapeSession("head", [{"B": 1}], fail)


@pytest.mark.parametrize(
    ("static", "message"),
    [
        (Static(batch=0), "the static batch is 0; it must be from 1 to 1024"),
        (Static(chunk=5000), r"the static chunk is 5000; it must be from 1 to \d+"),
        (Static(capacities=(64, 100000)), r"the static cache length is 100000; it must be from 1 to \d+"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(static: Static, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        prepare(GOLDEN / "qwen3_target", None, tmp_path / "bundle", cache_form="delta", static=static)


def test_caches_written_in_place_have_no_fixed_shapes(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot write caches in place; add --cache-form delta"):
        prepare(GOLDEN / "qwen3_target", None, tmp_path / "bundle", static=Static())


def test_the_ladder_ends_with_the_longest_text() -> None:
    assert Static().shapes(4, 2048).capacities == (256, 1024, 2048)
    assert Static().shapes(4, 200).capacities == (200,)
    assert Static(capacities=(512, 64)).shapes(4, 1024).capacities == (64, 512)


def test_compare_needs_any_shapes(
    fixed_bundle: FixedBundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "tead "}\n')
    bundle = fixed_bundle("dspark_vanilla")
    result = runner(monkeypatch, capsys)("compare", bundle, "--reference", bundle, "--input", rows)
    assert result.code == 1
    assert "export without --static to compare" in result.error


def test_there_is_nothing_to_profile(
    fixed_bundle: FixedBundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = fixed_bundle("dspark_vanilla")
    result = runner(monkeypatch, capsys)("profile", bundle)
    told = f"error: {bundle}: has fixed shapes, so what a step costs does not depend on its tokens\n"
    assert (result.code, result.out, result.error) == (1, "", told)
    assert not (bundle / "cost").exists()


def test_whole_drafts_are_verified_by_default(fixed_bundle: FixedBundle) -> None:
    plan = SpeculationOptions().resolve(Bundle.open(fixed_bundle("dspark_vanilla")).manifest)
    assert plan is not None
    assert plan.scheduler == "fixed"


def test_bench_measures_them(
    fixed_bundle: FixedBundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "tead "}\n')
    arguments = ("--input", rows, "--max-new-tokens", "24", "--json")
    result = runner(monkeypatch, capsys)("bench", fixed_bundle("dspark_vanilla", 3), *arguments)
    assert json.loads(result.out)["prompts"] > 0
