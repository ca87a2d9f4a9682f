"""Streams and cancellation from other threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread, Timer
from time import monotonic

import pytest

from dspark.runtime import SamplingParams
from dspark.runtime.engine.settings import EngineSettings
from tests.runtime.engine.support import LONG, THRESHOLD, drain, served, submitted
from tests.support.golden_models import PROMPTS, Arrays, load

GoldenBundle = Callable[[str], Path]


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
