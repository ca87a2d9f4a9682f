"""Where an output ends, and that nothing after its end is emitted or counted."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dspark.exporter.export import export_bundle, prepare
from dspark.runtime import Completion, DSparkInference, SamplingParams, SpeculationOptions
from tests.runtime.golden_models import DRAFTERS, GOLDEN, PROMPTS, Arrays, ids, load, outcome, tampered

GoldenBundle = Callable[[str], Path]

PROMPT = PROMPTS[1]
DRAFT_LENGTH = 5
HOT = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=seed) for seed in range(5)]
WHOLE = [SamplingParams(max_new_tokens=40), *HOT]


def rounds_of(completion: Completion) -> list[tuple[int, int]]:
    """Index of each round's first token in the output, and the draft tokens accepted."""
    first, rounds = 1, []
    for accepted in completion.stats.accepted_lengths:
        rounds.append((first, accepted))
        first += accepted + 1
    return rounds


def assert_cut(completion: Completion, whole: Completion, count: int) -> None:
    """A completion is the first ``count`` tokens of another, and its statistics know of no others."""
    assert completion.token_ids == whole.token_ids[:count]
    expected = [min(accepted, count - first) for first, accepted in rounds_of(whole) if first < count]
    assert completion.stats.accepted_lengths == expected
    assert completion.stats.rounds == len(completion.stats.draft_lengths) == len(expected)
    assert completion.prompt_tokens == len(PROMPT)
    emitted = 1 + sum(expected) + len(expected)  # of the prefill, accepted, and the target's own
    assert len(completion.token_ids) in (emitted, emitted - 1)  # the last round's own token can be cut
    if expected:
        assert completion.stats.acceptance_length == 1 + sum(expected) / len(expected)
    else:
        assert completion.stats.acceptance_length is None


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("params", [WHOLE[0], WHOLE[1]], ids=["greedy", "sampled"])
def test_max_new_tokens_is_exact(name: str, params: SamplingParams, golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle(name))
    whole = inference.generate([PROMPT], params)[0]
    for count in range(1, 2 * DRAFT_LENGTH + 4):
        completion = inference.generate([PROMPT], params.model_copy(update={"max_new_tokens": count}))[0]
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == count
        assert_cut(completion, whole, count)
        assert completion.text == "".join(map(chr, completion.token_ids))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_stop_string_that_ends_at_any_token_of_a_block(name: str, golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle(name))
    slots = set()
    for params in WHOLE[:3]:
        whole = inference.generate([PROMPT], params)[0]
        for count in range(1, len(whole.token_ids)):
            text = "".join(map(chr, whole.token_ids[:count]))
            for stop, kept in ((text, ""), (text[-4:], text[: text.find(text[-4:])])):
                if text.find(stop) + len(stop) < count:
                    continue  # it occurs earlier
                completion = inference.generate([PROMPT], params.model_copy(update={"stop": (stop, "never")}))[0]
                assert completion.finish_reason == "stop"
                assert completion.text == kept
                assert_cut(completion, whole, count)
            slots |= {count - 1 - first for first, accepted in rounds_of(whole) if first < count <= first + accepted + 1}
    assert slots == set(range(DRAFT_LENGTH + 1))


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_eos_at_any_slot_of_a_block(name: str, golden_bundle: GoldenBundle) -> None:
    """Every token of an output in turn is declared a stop token; in greedy text all slots come first somewhere."""
    texts = {"plain": load(golden_bundle(name))}
    slots = set()
    for params in WHOLE:
        whole = texts["plain"].generate([PROMPT], params)[0]
        for token in set(whole.token_ids):
            count = whole.token_ids.index(token) + 1
            inference = tampered(golden_bundle(name), untouched, stop_token_ids=(3, token, 5))
            completion = inference.generate([PROMPT], params)[0]
            assert completion.finish_reason == "stop"
            assert completion.token_ids[-1] == token
            assert completion.text == "".join(map(chr, completion.token_ids[:-1]))  # a stop token is no text
            assert_cut(completion, whole, count)
            slots |= {count - 1 - first for first, accepted in rounds_of(whole) if first < count <= first + accepted + 1}
    assert slots == set(range(DRAFT_LENGTH + 1))


def untouched(graph: str, inputs: Arrays, outputs: Arrays) -> None:
    pass
