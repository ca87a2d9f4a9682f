"""Prompts in chunks, and prompts that cannot be computed."""

from collections.abc import Callable
from pathlib import Path

from dspark.providers import ProviderError
from dspark.runtime import SamplingParams
from dspark.runtime.engine.settings import EngineSettings
from tests.runtime.engine.support import LONG, THRESHOLD, served
from tests.support.golden_models import PROMPTS, Arrays, load, outcome

GoldenBundle = Callable[[str], Path]


def test_a_prompt_that_the_graph_cannot_compute_ends_its_request_alone(golden_bundle: GoldenBundle) -> None:
    marker = 150
    assert all(marker not in prompt for prompt in PROMPTS)

    def fail(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "target" and marker in inputs["input_ids"]:
            raise ProviderError("out of memory")

    bundle = golden_bundle("dspark_vanilla")
    inference = served(bundle, 3, EngineSettings(prefill_tokens=16), THRESHOLD, fail)
    params = SamplingParams(max_new_tokens=20)
    bad = [*LONG[:40], marker]
    prompts = [PROMPTS[0], bad, PROMPTS[1], bad, PROMPTS[2]]
    found = inference.generate(prompts, params)
    expected = load(bundle, 1, THRESHOLD).generate([PROMPTS[0], PROMPTS[1], PROMPTS[2]], params)
    assert [outcome(each) for each in found[::2]] == [outcome(each) for each in expected]
    assert [(each.finish_reason, each.error) for each in found[1::2]] == [("error", "out of memory")] * 2
