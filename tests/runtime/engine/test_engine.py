"""Batches, slots and the cache: nothing but a request itself decides its output."""

import gc
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from dspark.runtime import Completion, DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.bundle.contract import CHOICES
from dspark.runtime.cache.key_value_cache import TARGET, KeyValueCache
from dspark.runtime.engine.prefill import PREFILL_CHUNK
from dspark.runtime.engine.request import Request
from dspark.runtime.model.eagle3_drafter import EXTENSION
from tests.support.costs import cost_table
from tests.support.golden_models import DRAFTERS, PROMPTS, Arrays, load, load_with_costs, outcome, tampered

GoldenBundle = Callable[[str], Path]
OFF = SpeculationOptions("off")
THRESHOLD = SpeculationOptions(confidence_threshold=0.6)
SHORT = SpeculationOptions("fixed", max_draft_tokens=2)

LOADED = [
    pytest.param("dspark_vanilla", None, id="vanilla"),
    pytest.param("dspark_vanilla", THRESHOLD, id="vanilla-threshold"),
    pytest.param("dspark_gated", SHORT, id="gated-short"),
    pytest.param("dflash", None, id="dflash"),
    pytest.param("eagle3", None, id="eagle3"),
    pytest.param("dflash", OFF, id="plain"),
]

SPECULATING = [param for param in LOADED if param.id in ("vanilla-threshold", "eagle3")]

SETTINGS = [
    SamplingParams(max_new_tokens=24),
    SamplingParams(max_new_tokens=20, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(max_new_tokens=16, logit_bias={32: -6.0, ord("e"): 3.0}),
    SamplingParams(max_new_tokens=22, stop=("th", "  ")),
    SamplingParams(max_new_tokens=18, temperature=1.0),
    SamplingParams(max_new_tokens=24, temperature=1.4, top_k=5),
    SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.7, stop=(" ",)),
    SamplingParams(max_new_tokens=24, temperature=1.0, min_p=0.1, frequency_penalty=1.0),
    SamplingParams(max_new_tokens=7, temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.2),
]

GREEDY = [params for params in SETTINGS if params.greedy]

CASES = [
    (prompt, params.model_copy(update={"seed": 100 * row + column}))
    for row, prompt in enumerate(PROMPTS[:4])
    for column, params in enumerate(SETTINGS)
]

LONG = [token for prompt in PROMPTS for token in prompt] * 2
"""A prompt of 246 tokens."""


def alone(inference: DSparkInference, cases: Sequence[tuple[list[int], SamplingParams]]) -> list[tuple]:
    """Outcomes of requests that have the engine to themselves, one after another."""
    return [outcome(inference.generate([prompt], params)[0]) for prompt, params in cases]


def completions(inference: DSparkInference, cases: Sequence[tuple[list[int], SamplingParams]]) -> list[Completion]:
    prompts, params = zip(*cases, strict=True)
    return inference.generate(prompts, params)


def rows(cache: KeyValueCache, group: int, tokens: int) -> np.ndarray:
    """The first tokens' rows of a cache with one slot, ``[layers, 2, kv_heads, tokens, head_dim]``."""
    return np.array(list(cache.layers(group, slice(0, 1))))[:, :, 0, :, :tokens]


# --- a batch and its single requests ---


@pytest.mark.parametrize(("name", "options"), LOADED)
def test_every_setting_in_one_batch_equals_each_alone(
    name: str, options: SpeculationOptions | None, golden_bundle: GoldenBundle
) -> None:
    bundle = golden_bundle(name)
    cases = CASES[9:]
    expected = alone(load(bundle, 1, options), cases)
    assert len({tuple(tokens) for tokens, *_ in expected}) > len(cases) * 0.7  # the settings do something
    order = np.random.default_rng(0).permutation(len(cases))
    together = completions(load(bundle, 7, options), [cases[index] for index in order])
    for index, completion in zip(order, together, strict=True):
        assert outcome(completion) == expected[index], cases[index]


@pytest.mark.parametrize("name", ["dspark_vanilla", "dspark_gated", "dflash", "eagle3"])
def test_greedy_requests_decode_as_without_a_drafter(name: str, golden_bundle: GoldenBundle) -> None:
    cases = [(prompt, params) for prompt in PROMPTS[:3] for params in GREEDY]
    bundle = golden_bundle(name)
    expected = [tokens for tokens, *_ in alone(load(bundle, 1, OFF), cases)]
    speculated = completions(load(bundle, 5), cases)
    assert [completion.token_ids for completion in speculated] == expected
    assert sum(sum(completion.stats.accepted_lengths) for completion in speculated) > 50


@pytest.mark.parametrize(("name", "options"), SPECULATING)
def test_identical_prompts_in_a_batch(
    name: str, options: SpeculationOptions | None, golden_bundle: GoldenBundle
) -> None:
    inference = load(golden_bundle(name), 6, options)
    for params in (SETTINGS[0], SETTINGS[4].model_copy(update={"seed": 5})):
        outcomes = [outcome(completion) for completion in inference.generate([PROMPTS[1]] * 6, params)]
        assert outcomes == [outcomes[0]] * 6
    hot = [SETTINGS[4].model_copy(update={"seed": seed}) for seed in range(6)]
    assert len({tuple(each.token_ids) for each in inference.generate([PROMPTS[1]] * 6, hot)}) == 6


@pytest.mark.parametrize(("name", "options"), SPECULATING)
def test_requests_that_join_and_leave_disturb_nobody(
    name: str, options: SpeculationOptions | None, golden_bundle: GoldenBundle
) -> None:
    bundle = golden_bundle(name)
    cases = CASES[::3]
    inference = load(bundle, 4, options)
    requests = [inference.request(prompt, params) for prompt, params in cases]
    for request in requests:
        inference.engine.submit(request)
        inference.engine.step()
        inference.engine.step()
    while not inference.engine.idle:
        inference.engine.step()
    assert [outcome(request.completion()) for request in requests] == alone(load(bundle, 1, options), cases)


# --- rollback ---


@pytest.mark.parametrize(("name", "options"), LOADED)
def test_the_cache_holds_the_text_and_nothing_else(
    name: str, options: SpeculationOptions | None, golden_bundle: GoldenBundle
) -> None:
    """After any number of rounds it is the one that prefilling the text gives; rejected tokens leave nothing."""
    inference = load(golden_bundle(name), 1, options)
    prompt, rejected = PROMPTS[1], 0
    for steps in range(1, 12):
        request = stopped_after(inference, prompt, steps)
        text = prompt + request.output_ids[:-1]
        fresh = stopped_after(inference, text, 1)
        assert request.cache is not None
        assert fresh.cache is not None
        kept, expected = request.cache.lengths[:, 0], fresh.cache.lengths[:, 0]
        assert kept[TARGET] == len(text)
        if name != "eagle3":  # which takes committed tokens over when it drafts the next time
            assert (kept == len(text)).all()
        for group, tokens in enumerate(np.minimum(kept, expected)):
            assert tokens >= len(prompt)
            assert np.abs(rows(request.cache, group, tokens) - rows(fresh.cache, group, tokens)).max() < 1e-4
        rejected += sum(request.stats.draft_lengths) - sum(request.stats.accepted_lengths)
    assert (rejected > 0) == (options is not OFF)


def stopped_after(inference: DSparkInference, prompt: list[int], steps: int) -> Request:
    """A request that was cancelled after some steps, with its cache."""
    request = inference.request(prompt, SamplingParams(max_new_tokens=100), keep_cache=True)
    inference.engine.submit(request)
    for _ in range(steps):
        inference.engine.step()
    inference.engine.cancel(request)
    assert inference.engine.idle
    return request


@pytest.mark.parametrize(("name", "options"), LOADED)
def test_the_same_prompt_twice(name: str, options: SpeculationOptions | None, golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle(name), 1, options)
    params = SamplingParams(max_new_tokens=40, temperature=0.9, seed=3)
    first = outcome(inference.generate([PROMPTS[0]], params)[0])
    again = outcome(inference.generate([PROMPTS[0]], params)[0])
    inference.generate([LONG], SamplingParams(max_new_tokens=60))
    after_another = outcome(inference.generate([PROMPTS[0]], params)[0])
    fresh = outcome(load(golden_bundle(name), 1, options).generate([PROMPTS[0]], params)[0])
    assert first == again == after_another == fresh


# --- prompts of several chunks ---


@pytest.mark.parametrize(("name", "options"), [*SPECULATING, LOADED[-1]])
@pytest.mark.parametrize("chunk", [1, 100])
def test_a_prompt_in_chunks_equals_one_in_a_piece(
    name: str,
    options: SpeculationOptions | None,
    chunk: int,
    golden_bundle: GoldenBundle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [(LONG, CASES[0][1]), (LONG[:99], CASES[4][1]), *CASES[7:12]]
    bundle = golden_bundle(name)
    expected = alone(load(bundle, 1, options), cases)
    monkeypatch.setattr("dspark.runtime.engine.prefill.PREFILL_CHUNK", chunk)
    monkeypatch.setattr("dspark.runtime.model.eagle3_drafter.EXTENSION", chunk)
    assert [outcome(completion) for completion in completions(load(bundle, 3, options), cases)] == expected


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_no_step_computes_more_of_a_prompt_than_a_chunk(name: str, golden_bundle: GoldenBundle) -> None:
    sizes = {"target": 0, "drafter": 0, "head": 0}

    def measure(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        tokens = inputs["input_ids" if "input_ids" in inputs else "anchor_ids"]
        sizes[graph] = max(sizes[graph], tokens.size)

    inference = tampered(golden_bundle(name), measure)
    prompt = (LONG * 2)[:480]
    assert len(inference.generate([prompt], SamplingParams(max_new_tokens=32))[0].token_ids) == 32
    assert sizes["target"] == PREFILL_CHUNK < len(prompt)
    assert sizes["drafter"] == (EXTENSION if name == "eagle3" else 1) < len(prompt)


# --- requests that are given up ---


@pytest.mark.parametrize(("name", "options"), SPECULATING)
def test_a_stream_closed_anywhere_leaves_nothing(
    name: str, options: SpeculationOptions | None, golden_bundle: GoldenBundle
) -> None:
    inference = load(golden_bundle(name), 1, options)
    cases = [CASES[4], CASES[9]]
    expected = alone(inference, cases)
    chunks = len(list(inference.stream(*CASES[0])))
    assert chunks > 5
    for taken in range(0, chunks + 1, 2):
        stream = inference.stream(*CASES[0])
        for _ in range(taken):
            next(stream)
        stream.close()
        assert inference.engine.idle
        assert outcome(inference.generate([cases[taken % 2][0]], cases[taken % 2][1])[0]) == expected[taken % 2]


@pytest.mark.parametrize(("name", "options"), SPECULATING)
def test_a_request_cancelled_anywhere_disturbs_nobody(
    name: str, options: SpeculationOptions | None, golden_bundle: GoldenBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits, after each chunk of its prompt, and after each round; neighbours run and one more waits."""
    monkeypatch.setattr("dspark.runtime.engine.prefill.PREFILL_CHUNK", 8)
    inference = load(golden_bundle(name), 3, options)
    neighbours = [(PROMPTS[1], SETTINGS[0]), (PROMPTS[3], SETTINGS[1]), CASES[13]]
    expected = alone(inference, neighbours)
    for position in range(3):
        for steps in (0, 1, 3, 5, 10):
            requests = [inference.request(prompt, params) for prompt, params in neighbours]
            victim = inference.request(PROMPTS[0], SamplingParams(max_new_tokens=100))
            for request in [*requests[:position], victim, *requests[position:]]:
                inference.engine.submit(request)
            for _ in range(steps):
                inference.engine.step()
            inference.engine.cancel(victim)
            while not inference.engine.idle:
                inference.engine.step()
            assert victim.finish_reason == "cancelled"
            assert [outcome(request.completion()) for request in requests] == expected


def test_a_cancelled_request_frees_its_slot_at_once(golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle("dspark_vanilla"), 1)
    running, waiting = (inference.request(PROMPTS[0], SamplingParams(max_new_tokens=100)) for _ in range(2))
    inference.engine.submit(running)
    inference.engine.submit(waiting)
    assert inference.engine.step() == [running]
    inference.engine.cancel(running)
    assert inference.engine.step() == [waiting]
    inference.engine.cancel(waiting)
    inference.engine.cancel(waiting)  # it is gone already
    assert inference.engine.idle


def test_a_step_that_breaks_leaves_no_request_behind(golden_bundle: GoldenBundle) -> None:
    calls = 0

    def interrupt(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        nonlocal calls
        calls += 1
        if calls == broken_call:
            raise KeyboardInterrupt

    for name in ("dspark_vanilla", "eagle3"):
        calls = broken_call = 0
        inference = tampered(golden_bundle(name), interrupt, 2)
        expected = [outcome(completion) for completion in completions(inference, CASES[3:6])]
        for call in range(1, calls, 5):
            calls, broken_call = 0, call
            with pytest.raises(KeyboardInterrupt):
                completions(inference, CASES[3:6])
            assert inference.engine.idle
            assert [outcome(completion) for completion in completions(inference, CASES[3:6])] == expected


@pytest.mark.parametrize("name", [pytest.param("dspark_vanilla", marks=pytest.mark.slow), "eagle3"])
def test_many_requests_through_few_slots(
    name: str, golden_bundle: GoldenBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.runtime.engine.prefill.PREFILL_CHUNK", 16)
    widths: list[int] = []

    def count(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "target":
            widths.append(len(inputs["pad_index"]))

    random = np.random.default_rng(17)
    cases = [random_case(random, seed) for seed in range(200)]
    inference = tampered(golden_bundle(name), count, 3)
    requests = [inference.request(prompt, params) for prompt, params in cases]
    for request in requests:
        inference.engine.submit(request)
        if random.random() < 0.7:
            inference.engine.step()
        if random.random() < 0.2:
            inference.engine.cancel(requests[random.integers(len(requests))])
    while not inference.engine.idle:
        inference.engine.step()
        if random.random() < 0.1:
            inference.engine.cancel(requests[random.integers(len(requests))])
    finished = [index for index, request in enumerate(requests) if request.finish_reason != "cancelled"]
    assert 100 < len(finished) < 190
    expected = alone(load(golden_bundle(name)), [cases[index] for index in finished])
    assert [outcome(requests[index].completion()) for index in finished] == expected
    widths.clear()
    completions(inference, [(PROMPTS[0], SamplingParams(max_new_tokens=60))] * 3)
    assert max(widths) == 3  # no slot is lost


def random_case(random: np.random.Generator, seed: int) -> tuple[list[int], SamplingParams]:
    start = int(random.integers(len(LONG) - 50))
    setting = SETTINGS[random.integers(len(SETTINGS))]
    changes = {"max_new_tokens": int(random.integers(1, 14)), "seed": seed}
    return LONG[start : start + int(random.integers(1, 50))], setting.model_copy(update=changes)


# --- values that are not finite ---


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("dspark_vanilla", THRESHOLD, np.nan),
        ("dspark_vanilla", THRESHOLD, -np.inf),
        ("eagle3", None, np.inf),
        ("dflash", OFF, np.nan),
    ],
)
def test_a_logit_that_is_not_finite_ends_its_request_alone(
    name: str, options: SpeculationOptions | None, value: float, golden_bundle: GoldenBundle
) -> None:
    prompt = PROMPTS[2]  # longer than the others with their outputs: its positions are its own
    others = [CASES[0], CASES[13], CASES[32]]
    assert all(len(tokens) + params.max_new_tokens < len(prompt) for tokens, params in others)
    poisoned = -1

    def poison(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "target":
            scored = inputs["position_ids"][inputs["logits_index"]]
            outputs["logits"][scored == poisoned, 65] = value

    inference = tampered(golden_bundle(name), poison, 4, options)
    for params in (SETTINGS[0], SETTINGS[4].model_copy(update={"seed": 1})):
        victim = (prompt, params)
        poisoned = -1
        whole, *expected = alone(inference, [victim, *others])
        for index in range(0, 10, 3):  # whose logits spoil the token with this index
            poisoned = len(prompt) - 1 + index
            failed, *rest = completions(inference, [victim, *others])
            assert failed.finish_reason == "error"
            assert failed.error is not None
            assert "token 65" in failed.error
            assert len(failed.token_ids) <= index
            assert failed.token_ids == whole[0][: len(failed.token_ids)]
            assert [outcome(completion) for completion in rest] == expected
    poisoned = len(prompt) + 3
    request = inference.request(prompt, keep_cache=True)
    inference.run([request])
    assert request.finish_reason == "error"
    assert request.cache is None


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_a_draft_logit_that_is_not_finite_ends_its_request_alone(name: str, golden_bundle: GoldenBundle) -> None:
    poisoning = False

    def poison(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        nonlocal poisoning
        if poisoning and len(outputs.get("draft_logits", [])) >= 2:
            outputs["draft_logits"][1, 0, 3] = np.nan
            poisoning = False

    inference = tampered(golden_bundle(name), poison, 3)
    hot = SamplingParams(max_new_tokens=12, temperature=1.0, seed=2)
    expected = alone(inference, [(PROMPTS[0], hot), (PROMPTS[2], SETTINGS[0])])
    poisoning = True
    first, failed, last = completions(inference, [(PROMPTS[0], hot), (PROMPTS[1], hot), (PROMPTS[2], SETTINGS[0])])
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert "drafter" in failed.error
    assert [outcome(first), outcome(last)] == expected


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_a_cache_that_was_spoilt_is_not_handed_on(
    name: str, golden_bundle: GoldenBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of early chunks are kept before anyone sees logits; masked, they still enter the next request's products."""
    monkeypatch.setattr("dspark.runtime.engine.prefill.PREFILL_CHUNK", 8)
    poisoning = True

    def poison(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "target" and poisoning:
            for name, rows in outputs.items():
                if name != CHOICES:
                    rows[:] = np.nan

    inference = tampered(golden_bundle(name), poison, 2)
    failed = inference.generate(PROMPTS, SETTINGS[0])
    assert {completion.finish_reason for completion in failed} == {"error"}
    poisoning = False
    expected = alone(load(golden_bundle(name)), CASES[:9])
    assert [outcome(completion) for completion in completions(inference, CASES[:9])] == expected


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_what_rejected_tokens_leave_does_not_spoil_their_request(name: str, golden_bundle: GoldenBundle) -> None:
    """A token that nobody decided for may overflow: its rows are masked, but masked values enter products."""
    poisoned = 0

    def poison(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        nonlocal poisoned
        if graph != "target" or len(outputs["logits"]) < 2:
            return
        ids, chosen = inputs["input_ids"], outputs["logits"].argmax(axis=1)
        unseen = 1 + int(np.logical_and.accumulate(chosen[:-1] == ids[1:]).sum())  # the first row that is not needed
        outputs["logits"][unseen:] = np.nan
        for cached, rows in outputs.items():
            if cached.startswith("present."):
                rows[0, :, inputs["position_ids"][unseen:]] = np.nan
                poisoned += len(ids) - unseen

    inference = tampered(golden_bundle(name), poison)
    cases = [(prompt, SETTINGS[0]) for prompt in PROMPTS]
    assert alone(inference, cases) == alone(load(golden_bundle(name)), cases)
    assert poisoned


# --- memory ---


@pytest.mark.parametrize(("name", "options"), SPECULATING)
def test_after_a_long_text_the_cache_is_as_short_again_as_others_need(
    name: str, options: SpeculationOptions | None, golden_bundle: GoldenBundle
) -> None:
    bundle = golden_bundle(name)
    cases = CASES[:9] * 3
    inference = load(bundle, 3, options)
    inference.generate([LONG], SamplingParams(max_new_tokens=1))
    long = inference.engine._slots._cache.capacity
    assert [outcome(each) for each in completions(inference, cases)] == alone(load(bundle, 1, options), CASES[:9]) * 3
    assert inference.engine._slots._cache.capacity == 64 < long // 2


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_make_the_cache_no_longer_than_texts_come_to(name: str, golden_bundle: GoldenBundle) -> None:
    costs = cost_table(lambda *_: 1.0)  # so that all that is useful is verified
    inference = load_with_costs(golden_bundle(name), "hardware", costs, 3)
    lengths = [65 - len(prompt) for prompt in PROMPTS[:3]]  # the last token is never cached
    done = inference.generate(PROMPTS[:3], [SamplingParams(max_new_tokens=length) for length in lengths])
    assert [len(each.token_ids) for each in done] == lengths
    assert sum(sum(each.stats.draft_lengths) for each in done) > 20
    assert inference.engine._slots._cache.capacity == 64


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", [pytest.param("dspark_vanilla", marks=pytest.mark.slow), "eagle3"])
def test_memory_is_flat_over_a_thousand_rounds(name: str, golden_bundle: GoldenBundle) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    inference = load(golden_bundle(name), 3)
    prompts, params = [LONG, PROMPTS[0], PROMPTS[1]], SamplingParams(max_new_tokens=150, temperature=1.0)
    inference.generate(prompts * 2, params)
    gc.collect()
    objects, memory, rounds = sys.getallocatedblocks(), resident(), 0
    while rounds < 1000:
        rounds += sum(completion.stats.rounds for completion in inference.generate(prompts, params))
    gc.collect()
    assert sys.getallocatedblocks() - objects < rounds  # not one object a round
    assert resident() - memory < 32 << 20
