"""Drafts are recorded as they went, and counted as the definitions say."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.runtime import NumericalError, SamplingParams, SpeculationOptions
from dspark.runtime.decoding.rounds import Round, RoundTable
from tests.support.golden_models import DRAFTERS, GOLDEN, PROMPTS, load, tampered

GoldenBundle = Callable[[str], Path]
WIDTH = 4


@st.composite
def any_round(draw: st.DrawFn) -> Round:
    verified = draw(st.integers(0, WIDTH))
    accepted = draw(st.integers(0, verified))
    ended = accepted > 0 and draw(st.booleans())
    logits = draw(st.lists(st.floats(-9, 9, width=32), min_size=WIDTH, max_size=WIDTH))
    return Round(verified, accepted, ended, np.array(logits, np.float32))


@given(st.lists(any_round(), max_size=12))
def test_positions_are_counted_as_defined(rounds: list[Round]) -> None:
    table = RoundTable.of(rounds, WIDTH, confidence=True)
    assert len(table) == len(rounds)
    for row, item in enumerate(rounds):
        for position in range(WIDTH):
            checked = position < (item.accepted if item.ended else item.verified)
            assert table.observed[row, position] == checked
            assert table.reached[row, position] == (checked and item.accepted >= position)
            assert table.survived[row, position] == (item.accepted > position)
    assert table.confidence is not None
    assert table.confidence.shape == (len(rounds), WIDTH)


def test_a_confidence_that_is_no_number_is_an_error() -> None:
    with pytest.raises(NumericalError, match="confidence head"):
        RoundTable.of([Round(1, 1, False, np.array([0, np.nan], np.float32))], 2, confidence=True)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_are_those_of_the_reference(name: str, golden_bundle: GoldenBundle) -> None:
    golden = json.loads((GOLDEN / name / "golden.json").read_text())["greedy"]
    model = load(golden_bundle(name), batch_size=3)
    requests = [model.request(prompt, SamplingParams(max_new_tokens=64)) for prompt in PROMPTS]
    model.run(requests)
    for request, case in zip(requests, golden, strict=True):
        rounds = request.rounds
        lengths = case["accepted_draft_lengths"]
        assert [item.accepted for item in rounds] == lengths[
            : len(rounds)
        ]  # the last one whole, though the limit cuts it
        emitted = np.cumsum([1, *(length + 1 for length in lengths)])
        assert emitted[len(rounds) - 1] < 63 <= emitted[len(rounds)]  # a last token is decoded without a draft
        assert {item.verified for item in rounds} == {5}
        assert not any(item.ended for item in rounds)
        assert all((item.confidence is not None) == name.startswith("dspark") for item in rounds)


def test_confidences_are_those_of_the_reference(golden_bundle: GoldenBundle) -> None:
    """Each round keeps its own; the buffer they come from is used again."""
    golden = np.load(GOLDEN / "dspark_vanilla" / "golden.npz")
    model = load(golden_bundle("dspark_vanilla"), batch_size=5)
    requests = [model.request(prompt, SamplingParams(max_new_tokens=30)) for prompt in PROMPTS]
    model.run(requests)
    for index, request in enumerate(requests):
        confidence = request.rounds[0].confidence
        assert confidence is not None
        np.testing.assert_allclose(confidence, golden[f"{index}.confidence_logits"], rtol=1e-3, atol=1e-4)


def test_what_no_draft_was_made_for_is_no_round(golden_bundle: GoldenBundle) -> None:
    for options, count in ((SpeculationOptions("off"), 20), (SpeculationOptions("fixed"), 2)):
        model = load(golden_bundle("dspark_vanilla"), options=options)
        request = model.request(PROMPTS[0], SamplingParams(max_new_tokens=count))
        model.run([request])
        assert request.rounds == []
        assert request.stats.rounds == count - 1


def test_a_draft_that_is_cut_to_nothing_is_a_round(golden_bundle: GoldenBundle) -> None:
    model = load(golden_bundle("dspark_vanilla"), options=SpeculationOptions(confidence_threshold=1.0))
    request = model.request(PROMPTS[0], SamplingParams(max_new_tokens=10))
    model.run([request])
    assert [(item.verified, item.accepted) for item in request.rounds] == [(0, 0)] * 8


def test_what_is_behind_an_accepted_stop_token_is_not_decided(golden_bundle: GoldenBundle) -> None:
    case = json.loads((GOLDEN / "dspark_vanilla" / "golden.json").read_text())["greedy"][4]
    output, lengths = case["output"], case["accepted_draft_lengths"]
    starts = np.cumsum([1, *(length + 1 for length in lengths)])
    index, slot = next(  # a token that first occurs in a draft, before its last slot
        (index, slot)
        for index, (start, length) in enumerate(zip(starts, lengths, strict=False))
        for slot in range(min(length, 4))
        if output[start + slot] not in output[: start + slot]
    )
    bundle = golden_bundle("dspark_vanilla")
    model = tampered(bundle, lambda *_: None, stop_token_ids=(output[starts[index] + slot],))
    request = model.request(case["prompt"], SamplingParams(max_new_tokens=64))
    model.run([request])
    assert request.finish_reason == "stop"
    assert [item.accepted for item in request.rounds] == [*lengths[:index], slot + 1]
    assert [item.ended for item in request.rounds] == [False] * index + [True]
    assert request.rounds[-1].verified == 5
    table = RoundTable.of(request.rounds, 5, confidence=True)
    assert table.reached[-1].sum() == table.observed[-1].sum() == slot + 1
