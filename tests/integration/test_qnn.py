"""The whole loop on the simulator of Qualcomm's NPU, fp16, fixed shapes, strictly placed: where QNN is installed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.exporter.export import Static, export_bundle, prepare
from dspark.exporter.precision import Precision, PrecisionProfile
from dspark.providers import LoadOptions, ProviderError, find_provider
from dspark.runtime import DSparkInference, SamplingParams

pytestmark = [pytest.mark.providers, pytest.mark.slow]
GOLDEN = Path(__file__).parents[1] / "golden"
NEW_TOKENS = 12
"""The simulator takes a good part of a second for each call."""


@pytest.fixture(autouse=True)
def _qnn() -> None:
    problem = find_provider("qnn").discover().problem
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("qnn")

    def export(drafter: str) -> Path:
        output = root / drafter
        if not output.exists():
            fp16 = PrecisionProfile.of(Precision.FP16)
            static = Static(1, 16, (64, 128))
            target = GOLDEN / "qwen3_target"
            planned = prepare(target, GOLDEN / drafter, output, precision=fp16, cache_form="delta", static=static)
            export_bundle(planned)
        return output

    return export


@pytest.mark.parametrize("drafter", ["dspark_vanilla", "dspark_gated", "dflash", "speculators_dspark", "eagle3"])
def test_golden_models(drafter: str, bundle: Callable[[str], Path]) -> None:
    """Greedy output equals the golden one, and drafts are accepted as often, within 5 %."""
    cases = json.loads((GOLDEN / drafter / "golden.json").read_text())["greedy"]
    cases = sorted(cases, key=lambda case: len(case["prompt"]))[:2]
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    prompts = [case["prompt"] for case in cases]
    provider = ["qnn", "drafter=cpu"] if drafter == "eagle3" else ["qnn"]  # its GatherND is not QNN's
    found = DSparkInference.load(bundle(drafter), provider=provider).generate(prompts, params)
    on_cpu = DSparkInference.load(bundle(drafter)).generate(prompts, params)
    assert [completion.token_ids for completion in found] == [case["output"][:NEW_TOKENS] for case in cases]
    accepted = [
        sum(sum(each.stats.accepted_lengths) for each in every) / sum(each.stats.rounds for each in every)
        for every in (found, on_cpu)
    ]
    assert accepted[0] == pytest.approx(accepted[1], rel=0.05)


def test_dynamic_shapes_are_not_placed(bundle: Callable[[str], Path]) -> None:
    """Strict placement fails and names the nodes that would run on the host; fixed shapes pass."""
    model, qnn = bundle("dspark_vanilla") / "target.onnx", find_provider("qnn")
    with pytest.raises(ProviderError, match=r"qnn cannot run \d+ of the graph's nodes: .*--allow-fallback") as raised:
        qnn.open(model)
    assert "layers.0/" in str(raised.value) or "rope/" in str(raised.value)
    fixed = {"B": 1, "T": 6, "N": 6, "K": 6, "S": 64, "S+T": 70}
    assert {node.provider for node in qnn.placement(model, LoadOptions(dimensions=fixed))} == {"QNNExecutionProvider"}
