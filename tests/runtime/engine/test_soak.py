"""Requests of every kind come, go, are cancelled and fail, for a long time: nobody notices the others."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from dspark.runtime import DSparkInference, NumericalError, SamplingParams, SpeculationOptions
from dspark.runtime.engine.request import Priority, Request
from dspark.runtime.engine.settings import EngineSettings
from tests.support.golden_models import PROMPTS, Arrays, outcome, tampered

GoldenBundle = Callable[[str], Path]

OFF, THRESHOLD = SpeculationOptions("off"), SpeculationOptions("threshold", confidence_threshold=0.6)
FIXED = SpeculationOptions("fixed")
MARKER = 150
"""A token after which the target's logits are not finite."""
TEXT = [token for prompt in PROMPTS for token in prompt] * 2
SETTINGS = EngineSettings(prefill_tokens=24, cache_tokens=200)
SLOTS = 5


def poison(graph: str, inputs: Arrays, outputs: Arrays) -> None:
    if graph == "target":
        scored = inputs["input_ids"][inputs["logits_index"]]
        outputs["logits"][scored == MARKER, 65] = np.nan


def random_case(random: np.random.Generator, seed: int) -> tuple[list[int], SamplingParams]:
    """A prompt and settings; one in ten fails, at its prompt's end or in the middle of its output."""
    start, size = int(random.integers(len(TEXT) - 60)), int(random.choice([2, 8, 20, 55]))
    prompt = TEXT[start : start + size]
    options = {
        "max_new_tokens": int(random.integers(1, 24)),
        "seed": seed,
        "temperature": float(random.choice([0.0, 0.0, 0.7, 1.3])),
        "top_k": int(random.choice([0, 5])),
        "top_p": float(random.choice([1.0, 0.8])),
        "repetition_penalty": float(random.choice([1.0, 1.2])),
        "frequency_penalty": float(random.choice([0.0, 0.6])),
        "stop": ("th",) if random.random() < 0.1 else (),
    }
    failure = random.random()
    if failure < 0.05:
        prompt[-1] = MARKER
    elif failure < 0.1:
        options["logit_bias"] = {MARKER: float(random.choice([4.0, 1000.0]))}
    return prompt, SamplingParams(**options)


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("dspark_vanilla", THRESHOLD, 200),
        pytest.param("dspark_vanilla", THRESHOLD, 2000, marks=pytest.mark.slow),
        pytest.param("dspark_gated", FIXED, 2000, marks=pytest.mark.slow),
        pytest.param("eagle3", FIXED, 2000, marks=pytest.mark.slow),
        pytest.param("qwen3_target", OFF, 2000, marks=pytest.mark.slow),
    ],
)
def test_requests_of_every_kind_for_a_long_time(
    name: str, options: SpeculationOptions, count: int, golden_bundle: GoldenBundle
) -> None:
    random = np.random.default_rng(2026)
    widths: list[int] = []

    def tamper(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "target":
            widths.append(len(inputs["pad_index"]))
        poison(graph, inputs, outputs)

    inference = tampered(golden_bundle(name), tamper, SLOTS, options, SETTINGS)
    alone = tampered(golden_bundle(name), poison, 1, options)
    ended: Counter[str | None] = Counter()
    memory: list[tuple[int, int]] = []
    for first in range(0, count, count // 10):
        cases = [random_case(random, seed) for seed in range(first, first + count // 10)]
        requests = under_load(inference, cases, random)
        ended.update(request.finish_reason for request in requests)
        for request, (prompt, params) in zip(requests, cases, strict=True):
            if request.finish_reason != "cancelled":
                assert outcome(request.completion()) == outcome(alone.generate([prompt], params)[0]), (prompt, params)
        assert not inference.engine._slots._cache.lengths.any()
        widths.clear()
        inference.generate([TEXT[:2]] * SLOTS, SamplingParams(max_new_tokens=20))
        assert max(widths) == SLOTS  # no slot is lost
        del requests, request
        widths.clear()
        gc.collect()
        memory.append((sys.getallocatedblocks(), inference.engine._slots._cache.nbytes))
    assert ended[None] == 0
    assert min(ended["cancelled"], ended["error"]) > count * 0.04
    assert ended["length"] > count * 0.6
    (early, early_bytes), (late, late_bytes) = memory[4], memory[9]
    assert late - early < count / 2  # not one block a request
    assert late_bytes == early_bytes


def under_load(
    inference: DSparkInference, cases: Sequence[tuple[list[int], SamplingParams]], random: np.random.Generator
) -> list[Request]:
    """Runs requests that come while others run; some are cancelled, wherever they are."""
    engine, requests = inference.engine, list[Request]()
    for prompt, params in cases:
        priority: Priority = "batch" if random.random() < 0.4 else "interactive"
        requests.append(inference.request(prompt, params, priority=priority))
        engine.submit(requests[-1])
        while random.random() < 0.65:
            engine.step()
        under_way = [each for each in requests if each.finish_reason is None]
        if under_way and random.random() < 0.12:
            engine.cancel(under_way[random.integers(len(under_way))])
    while not engine.idle:
        engine.step()
    return requests


def test_threads_come_go_and_cancel(golden_bundle: GoldenBundle) -> None:
    """Each thread streams its requests; another one cancels some of them, whatever they are doing."""
    random = np.random.default_rng(7)
    cases = [random_case(random, seed) for seed in range(80)]
    bundle = golden_bundle("dspark_vanilla")
    inference = tampered(bundle, poison, SLOTS, THRESHOLD, SETTINGS)
    alone = tampered(bundle, poison, 1, THRESHOLD)
    requests = [inference.request(prompt, params) for prompt, params in cases]
    victims = [requests[index] for index in random.permutation(len(requests))[:30]]

    def stream(request: Request) -> list[int]:
        tokens: list[int] = []
        with suppress(NumericalError):  # of requests that fail
            for chunk in inference.follow(request):
                tokens += chunk.token_ids
        return tokens

    with ThreadPoolExecutor(8) as pool:
        streamed = pool.map(stream, requests)
        for victim in victims:
            sleep(0.01)
            inference.engine.cancel(victim)
        outputs = list(streamed)
    assert inference.engine.idle
    assert outputs == [request.output_ids for request in requests]
    ended = Counter(request.finish_reason for request in requests)
    assert ended["length"] > 20
    for request, (prompt, params) in zip(requests, cases, strict=True):
        if request.finish_reason != "cancelled":
            assert outcome(request.completion()) == outcome(alone.generate([prompt], params)[0])
        else:
            assert request in victims
