"""The loop with the target on ggml's CPU kernels, strictly placed: real, where onnxruntime-ggml is installed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.providers import ProviderError, find_provider
from dspark.runtime import DSparkInference, SamplingParams, SpeculationOptions

pytestmark = pytest.mark.providers
GOLDEN = Path(__file__).parents[1] / "golden"
GoldenBundle = Callable[..., Path]


@pytest.fixture(autouse=True)
def _ggml() -> None:
    problem = find_provider("ggml").discover().problem
    if problem is not None:
        pytest.skip(problem)


@pytest.mark.parametrize("drafter", ["dspark_vanilla", "dspark_gated", "dflash", "speculators_dspark", "eagle3"])
def test_golden_models(drafter: str, golden_bundle: GoldenBundle) -> None:
    """Drafter and head stay on the CPU: onnxruntime-ggml 0.2 crashes in the one's second run, and lacks ArgMax."""
    cases = json.loads((GOLDEN / drafter / "golden.json").read_text())["greedy"]
    bundle, whole_drafts = golden_bundle(drafter, "delta"), SpeculationOptions("fixed")
    model = DSparkInference.load(bundle, provider="target=ggml", batch_size=3, threads=2, options=whole_drafts)
    found = model.generate([case["prompt"] for case in cases], SamplingParams(max_new_tokens=64))
    assert [completion.token_ids for completion in found] == [case["output"] for case in cases]
    for completion, case in zip(found, cases, strict=True):
        whole = completion.stats.rounds - 1  # the last round may be cut
        assert completion.stats.accepted_lengths[:whole] == case["accepted_draft_lengths"][:whole]


def test_a_head_is_refused_by_the_names_of_its_nodes(golden_bundle: GoldenBundle) -> None:
    with pytest.raises(
        ProviderError, match=r"head\.onnx: ggml cannot run \d+ of the graph's nodes: .*--allow-fallback"
    ):
        find_provider("ggml").open(golden_bundle("dspark_vanilla", "delta") / "head.onnx")
