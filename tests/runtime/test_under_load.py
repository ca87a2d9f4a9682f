"""The engine's settings, priorities, cancellation from other threads, and failures of single requests."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread, Timer
from time import monotonic

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.providers import ProviderError
from dspark.runtime import DSparkInference, RequestError, SamplingParams, SpeculationOptions
from dspark.runtime.engine.request import Request
from dspark.runtime.engine.settings import EngineSettings
from tests.runtime.golden_models import PROMPTS, Arrays, Tamper, load, outcome, tampered

GoldenBundle = Callable[[str], Path]

FIXED, THRESHOLD = SpeculationOptions("fixed"), SpeculationOptions("threshold", confidence_threshold=0.6)
OFF = SpeculationOptions("off")
LONG = [token for prompt in PROMPTS for token in prompt] * 2


def nothing(graph: str, inputs: Arrays, outputs: Arrays) -> None:
    """Tampers with nothing."""


def served(
    bundle: Path,
    batch_size: int,
    engine_settings: EngineSettings,
    options: SpeculationOptions = FIXED,
    tamper: Tamper = nothing,
) -> DSparkInference:
    return tampered(bundle, tamper, batch_size, options, engine_settings)


def submitted(inference: DSparkInference, *lengths: int, prompt: Sequence[int] = PROMPTS[0]) -> list[Request]:
    """Requests that generate so many tokens each."""
    requests = [inference.request(prompt, SamplingParams(max_new_tokens=length)) for length in lengths]
    for request in requests:
        inference.engine.submit(request)
    return requests


def drain(inference: DSparkInference) -> None:
    while not inference.engine.idle:
        inference.engine.step()


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


# --- tokens a step ---


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


def test_a_held_request_can_be_cancelled(golden_bundle: GoldenBundle) -> None:
    inference = served(golden_bundle("dspark_vanilla"), 4, EngineSettings(min_batch_size=2, max_queue_delay=30.0))
    (held,) = submitted(inference, 5)
    timer = Timer(0.05, inference.engine.cancel, [held])
    timer.start()
    start = monotonic()
    assert inference.engine.step() == []
    assert monotonic() - start < 20
    assert held.finish_reason == "cancelled"
    timer.join()


# --- priorities ---


def test_batch_requests_run_beside_interactive_ones_that_keep_coming(golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle("dspark_vanilla"), 2, FIXED)
    params = SamplingParams(max_new_tokens=6)
    patient = [inference.request(PROMPTS[1], params, priority="batch") for _ in range(3)]
    for request in patient:
        inference.engine.submit(request)
    others: list[Request] = []
    started: list[Request] = []
    while any(request.finish_reason is None for request in patient):
        while sum(each.finish_reason is None for each in others) < 8:  # there is always a crowd
            others += submitted(inference, 6)
        started += [each for each in inference.engine.step() if each not in started]
        assert len(others) < 40
    assert [started.index(request) for request in patient] == [3, 7, 11]
    for each in others:
        inference.engine.cancel(each)


def test_interactive_requests_go_first(golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle("dspark_vanilla"), 1, FIXED)
    params = SamplingParams(max_new_tokens=4)
    bulk = [inference.request(PROMPTS[1], params, priority="batch") for _ in range(4)]
    for request in bulk:
        inference.engine.submit(request)
    (urgent,) = submitted(inference, 4)
    while urgent.finish_reason is None:
        inference.engine.step()
    assert [each.finish_reason for each in bulk] == [None] * 4
    drain(inference)
    assert [each.finish_reason for each in bulk] == ["length"] * 4


def test_a_priority_that_does_not_exist_is_refused(golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle("dspark_vanilla"), 1, FIXED)
    with pytest.raises(RequestError, match="priority is 'urgent'; there are interactive and batch"):
        inference.generate([PROMPTS[0]], priority="urgent")  # type: ignore[arg-type]


# --- other threads ---


def test_streams_in_several_threads_equal_each_alone(golden_bundle: GoldenBundle) -> None:
    bundle = golden_bundle("dspark_vanilla")
    cases = [
        (PROMPTS[index % 4], SamplingParams(max_new_tokens=30, temperature=float(index % 2), seed=index))
        for index in range(8)
    ]
    single = load(bundle, 1, THRESHOLD)
    expected = [single.generate([prompt], params)[0] for prompt, params in cases]
    inference = load(bundle, 3, THRESHOLD)

    def stream(case: tuple[list[int], SamplingParams]) -> tuple[str, list[int]]:
        chunks = list(inference.stream(*case))
        return "".join(chunk.text for chunk in chunks), [token for chunk in chunks for token in chunk.token_ids]

    with ThreadPoolExecutor(len(cases)) as pool:
        assert list(pool.map(stream, cases)) == [(each.text, each.token_ids) for each in expected]
    assert inference.engine.idle


@pytest.mark.parametrize(
    ("batch_size", "prompt"),
    [
        pytest.param(2, PROMPTS[1], id="running"),
        pytest.param(2, LONG[:200], id="prefilling"),
        pytest.param(1, PROMPTS[1], id="waiting"),
    ],
)
def test_cancelled_by_another_thread_during_a_step_it_is_gone_when_the_step_ends(
    batch_size: int, prompt: list[int], golden_bundle: GoldenBundle
) -> None:
    inside, go_on = Event(), Event()
    go_on.set()

    def pause(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        inside.set()
        assert go_on.wait(20)

    bundle = golden_bundle("dspark_vanilla")
    inference = served(bundle, batch_size, EngineSettings(prefill_tokens=32), THRESHOLD, pause)
    (neighbour,) = submitted(inference, 40)
    inference.engine.step()
    (victim,) = submitted(inference, 40, prompt=prompt)
    inference.engine.step()
    inside.clear()
    go_on.clear()
    stepping = Thread(target=inference.engine.step)
    stepping.start()
    assert inside.wait(20)
    inference.engine.cancel(victim)  # does not wait for the step
    assert victim.finish_reason is None
    go_on.set()
    stepping.join()
    assert victim.finish_reason == "cancelled"
    assert bool(victim.output_ids) == (prompt is PROMPTS[1] and batch_size == 2)
    (successor,) = submitted(inference, 5)
    if batch_size == 2:
        assert successor in inference.engine.step()  # the slot is free
    drain(inference)
    expected = load(bundle, 1, THRESHOLD).generate([PROMPTS[0]], SamplingParams(max_new_tokens=40))[0].token_ids
    assert neighbour.output_ids == expected
    assert successor.output_ids == expected[:5]


def test_a_stream_ends_when_another_thread_cancels_its_request(golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle("dspark_vanilla"), 2, THRESHOLD)
    request = inference.request(PROMPTS[0], SamplingParams(max_new_tokens=400))
    chunks = inference.follow(request)
    tokens = next(chunks).token_ids
    with ThreadPoolExecutor(1) as pool:
        pool.submit(inference.engine.cancel, request).result()
    tokens += [token for chunk in chunks for token in chunk.token_ids]
    assert request.finish_reason == "cancelled"
    assert tokens == request.output_ids
    assert len(tokens) < 400
    assert inference.engine.idle


# --- failures of single requests ---


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
