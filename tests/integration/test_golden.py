"""The golden files: trained models, and what the reference implementation of the training repository made of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.runtime import DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.bundle.manifest import CacheForm
from tests.support.exported import Recorder, assert_close

GOLDEN = Path(__file__).parents[1] / "golden"
TARGETS = ["qwen3_target", "llama_target"]
BLOCK_DRAFTERS = ["dspark_vanilla", "dspark_gated", "dflash", "speculators_dspark"]
DRAFTERS = [*BLOCK_DRAFTERS, "eagle3"]
THRESHOLDS = {"greedy": None, "greedy_threshold_0_6": 0.6}
NEW_TOKENS = 64
BATCHES = [(1, "in-place"), (3, "in-place"), (3, "delta")]


def golden(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / name / "golden.json").read_text())
    return content


@pytest.mark.parametrize(("batch_size", "cache_form"), BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_plain_decoding(name: str, batch_size: int, cache_form: CacheForm, golden_bundle: Callable[..., Path]) -> None:
    cases = golden(name)["greedy"]
    model = DSparkInference.load(golden_bundle(name, cache_form), threads=1, batch_size=batch_size)
    completions = model.generate([case["prompt"] for case in cases], SamplingParams(max_new_tokens=NEW_TOKENS))
    assert [completion.token_ids for completion in completions] == [case["output"] for case in cases]


@pytest.mark.parametrize(("batch_size", "cache_form"), BATCHES)
@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in DRAFTERS for key in THRESHOLDS if golden(name).get(key)]
)
def test_speculative_decoding(
    name: str, key: str, batch_size: int, cache_form: CacheForm, golden_bundle: Callable[..., Path]
) -> None:
    cases = golden(name)[key]
    threshold = THRESHOLDS[key]
    options = SpeculationOptions("fixed" if threshold is None else "threshold", confidence_threshold=threshold)
    bundle = golden_bundle(name, cache_form)
    model = DSparkInference.load(bundle, threads=1, batch_size=batch_size, options=options)
    completions = model.generate([case["prompt"] for case in cases], SamplingParams(max_new_tokens=NEW_TOKENS))
    for completion, case in zip(completions, cases, strict=True):
        stats, whole = completion.stats, completion.stats.rounds - 1  # the last round may be cut
        assert completion.token_ids == case["output"]
        assert stats.accepted_lengths[:whole] == case["accepted_draft_lengths"][:whole]
        assert stats.draft_lengths[:whole] == case["proposal_lengths"][:whole]
        # The golden loop runs once more, for nothing, when a round ends exactly at the limit.
        idle = 1 + sum(case["accepted_draft_lengths"][: whole + 1]) + stats.rounds == NEW_TOKENS
        assert len(case["proposal_lengths"]) == stats.rounds + idle


def test_every_drafter_with_a_confidence_head_has_both_kinds() -> None:
    assert [name for name in DRAFTERS if golden(name).get("greedy_threshold_0_6")] == [
        "dspark_vanilla",
        "dspark_gated",
        "speculators_dspark",
    ]


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_blocks(name: str, golden_bundle: Callable[[str], Path]) -> None:
    graphs = Recorder(golden_bundle(name))
    model = graphs.model()
    with np.load(GOLDEN / name / "golden.npz") as expected:
        for i in range(len(golden(name)["greedy"])):
            graphs.calls.clear()
            completion = model.generate([expected[f"{i}.prompt"].tolist()], SamplingParams(max_new_tokens=3))[0]
            assert completion.token_ids[0] == expected[f"{i}.anchor"]
            prefill, draft, head = graphs.calls[:3]
            assert [call.graph for call in (prefill, draft, head)] == ["target", "drafter", "head"]
            assert_close(prefill.outputs["logits"][0], expected[f"{i}.target_logits"][-1])
            assert_close(draft.outputs["hidden"][0], expected[f"{i}.hidden"])
            assert_close(draft.outputs["base_logits"][0], expected[f"{i}.base_logits"])
            assert head.outputs["tokens"][0].tolist() == expected[f"{i}.tokens"].tolist()
            assert_close(head.outputs["draft_logits"][0], expected[f"{i}.logits"])
            assert ("confidence" in head.outputs) == (f"{i}.confidence_logits" in expected)
            if "confidence" in head.outputs:
                assert_close(head.outputs["confidence"][0], expected[f"{i}.confidence_logits"])
