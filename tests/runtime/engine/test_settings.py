"""The engine's settings: room in the cache, tokens per step, and an idle engine that waits for a batch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Timer
from time import monotonic

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.runtime import DSparkInference, RequestError, SamplingParams
from dspark.runtime.engine.request import Request
from dspark.runtime.engine.settings import EngineSettings
from tests.runtime.engine.support import FIXED, LONG, OFF, drain, served, submitted
from tests.support.golden_models import PROMPTS, Arrays, load

GoldenBundle = Callable[[str], Path]


# --- admission by cache memory ---


@pytest.fixture(scope="module")
def plain(golden_bundle: GoldenBundle) -> DSparkInference:
    return served(golden_bundle("qwen3_target"), 6, EngineSettings(cache_tokens=60), OFF)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=12))
def test_the_admitted_requests_never_come_to_more_than_the_cache_holds(
    plain: DSparkInference, sizes: Sequence[tuple[int, int, int]]
) -> None:
    """Whatever comes when: all end in the order they came, none is admitted too early."""
    waiting: list[Request] = []
    admitted: list[Request] = []
    everyone: list[Request] = []
    for prompt_length, length, steps in [*sizes, (1, 1, 500)]:
        request = plain.request(LONG[:prompt_length], SamplingParams(max_new_tokens=length))
        plain.engine.submit(request)
        everyone.append(request)
        waiting.append(request)
        for _ in range(steps):
            for touched in plain.engine.step():
                if touched in waiting:
                    assert touched is waiting.pop(0)
                    admitted.append(touched)
            under_way = [each for each in admitted if each.finish_reason is None]
            assert sum(len(each.prompt_ids) + each.sampler.params.max_new_tokens for each in under_way) <= 60
    assert plain.engine.idle
    assert [each.finish_reason for each in everyone] == ["length"] * len(everyone)


def test_requests_run_together_as_far_as_the_cache_allows(golden_bundle: GoldenBundle) -> None:
    """Limits that bind nobody are no limits: neither too few nor too many run at once."""
    size = len(PROMPTS[0]) + 12
    for room, expected in [(size, 1), (3 * size - 1, 2), (3 * size, 3), (None, 4)]:
        widths: list[int] = []

        def note(graph: str, inputs: Arrays, outputs: Arrays, widths: list[int] = widths) -> None:
            if graph == "target":
                widths.append(len(inputs["pad_index"]))

        inference = served(golden_bundle("qwen3_target"), 4, EngineSettings(cache_tokens=room), OFF, note)
        submitted(inference, *[12] * 6)
        drain(inference)
        assert max(widths) == expected


def test_a_request_that_can_never_fit_is_refused_before_any_work(golden_bundle: GoldenBundle) -> None:
    inference = served(golden_bundle("dspark_vanilla"), 2, EngineSettings(cache_tokens=60))
    with pytest.raises(RequestError, match=r"50 tokens and max_new_tokens 11 make 61; the cache has room for 60"):
        inference.generate([PROMPTS[0], LONG[:50]], SamplingParams(max_new_tokens=11))
    assert inference.engine.idle
    assert len(inference.generate([LONG[:50]], SamplingParams(max_new_tokens=10))[0].token_ids) == 10


# --- tokens per step ---


@pytest.mark.parametrize("prefill_tokens", [16, 50])
def test_a_step_computes_no_more_of_prompts_than_set(prefill_tokens: int, golden_bundle: GoldenBundle) -> None:
    steps: list[int] = []

    def note(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "target" and len(inputs["logits_index"]) < len(inputs["input_ids"]):
            steps[-1] += len(inputs["input_ids"])

    bundle = golden_bundle("qwen3_target")
    inference = served(bundle, 4, EngineSettings(prefill_tokens=prefill_tokens), OFF, note)
    (runner,) = submitted(inference, 60)
    others = submitted(inference, 5, 5, prompt=LONG[:100])
    while not inference.engine.idle:
        steps.append(0)
        before = len(runner.output_ids)
        inference.engine.step()
        assert not 0 < len(runner.output_ids) == before < 60  # once it runs, it never stalls
    assert max(steps) == prefill_tokens
    expected = load(bundle, 1, OFF).generate([LONG[:100]], SamplingParams(max_new_tokens=5))[0].token_ids
    assert [each.output_ids for each in others] == [expected] * 2


@pytest.mark.parametrize("step_tokens", [1, 4, 9, 16])
def test_a_verification_step_carries_no_more_tokens_than_set(step_tokens: int, golden_bundle: GoldenBundle) -> None:
    sizes: list[tuple[int, int]] = []

    def note(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "target" and len(inputs["logits_index"]) == len(inputs["input_ids"]):
            sizes.append((len(inputs["pad_index"]), len(inputs["input_ids"])))

    bundle = golden_bundle("dspark_vanilla")
    inference = served(bundle, 4, EngineSettings(step_tokens=step_tokens), FIXED, note)
    params = SamplingParams(max_new_tokens=20)
    found = [each.token_ids for each in inference.generate(PROMPTS[:4], params)]
    assert found == [each.token_ids for each in load(bundle, 1, OFF).generate(PROMPTS[:4], params)]
    assert all(tokens <= max(step_tokens, requests) for requests, tokens in sizes)
    if step_tokens == 16:
        assert (4, 16) in sizes  # what may be verified is verified


# --- an idle engine that waits for a batch ---


def test_an_idle_engine_waits_for_a_batch_and_no_longer_than_set(golden_bundle: GoldenBundle) -> None:
    bundle = golden_bundle("dspark_vanilla")
    inference = served(bundle, 4, EngineSettings(min_batch_size=3, max_queue_delay=30.0))
    first = submitted(inference, 20)
    timer = Timer(0.05, lambda: first.extend(submitted(inference, 20, 20)))
    timer.start()
    start = monotonic()
    assert inference.engine.step() == first  # all three start together
    assert len(first) == 3
    assert monotonic() - start < 20
    timer.join()
    late = submitted(inference, 4)
    start = monotonic()
    assert late[0] in inference.engine.step()  # who joins a running batch does not wait
    drain(inference)
    assert monotonic() - start < 20

    inference = served(bundle, 4, EngineSettings(min_batch_size=3, max_queue_delay=0.1))
    start = monotonic()
    inference.generate([PROMPTS[0]], SamplingParams(max_new_tokens=2))
    assert 0.1 <= monotonic() - start < 5


def test_a_batch_is_never_larger_than_the_engine(golden_bundle: GoldenBundle) -> None:
    inference = served(golden_bundle("dspark_vanilla"), 1, EngineSettings(min_batch_size=16, max_queue_delay=30.0))
    start = monotonic()
    inference.generate([PROMPTS[0]], SamplingParams(max_new_tokens=2))
    assert monotonic() - start < 20
