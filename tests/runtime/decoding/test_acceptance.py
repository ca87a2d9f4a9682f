"""What the accept rule does token by token: lengths, penalties inside a block, stops, errors, seeds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.decoding.scores import Scores
from dspark.runtime.errors import NumericalError

SIZE = 8
NONE = np.empty(0, np.int64)
WARM = SamplingParams(temperature=1.0, seed=1)


def bigram(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (size, size)).astype(np.float32)


def rows_for(tokens: list[int], size: int = SIZE) -> np.ndarray:
    """Logits whose greedy continuation is `tokens`."""
    return np.eye(size, dtype=np.float32)[tokens] * 20


@pytest.mark.parametrize("accepted", range(5))
def test_greedy_accepts_up_to_the_first_difference(accepted):
    own = [3, 1, 4, 1, 5]
    draft = own[:4]
    if accepted < 4:
        draft[accepted] = 7
    result = Sampler(SamplingParams(), [], SIZE).accept(Scores(rows_for(own)), np.array(draft), None, None)
    assert result == (accepted, own[: accepted + 1])


def test_a_greedy_request_ignores_the_draft_logits():
    own = [3, 1]
    draft_logits = np.full((1, SIZE), np.nan, np.float32)
    assert Sampler(SamplingParams(), [], SIZE).accept(Scores(rows_for(own)), np.array([3]), draft_logits, None) == (
        1,
        own,
    )


def test_a_request_without_draft_gets_the_targets_token():
    logits = bigram(0)
    for params in (SamplingParams(), WARM):
        accepted, emitted = Sampler(params, [], SIZE).accept(Scores(logits[:1]), NONE, None, None)
        assert accepted == 0
        assert emitted == [Sampler(params, [], SIZE).next_token(Scores(logits[:1]))]


def test_a_draft_that_equals_the_target_is_accepted():
    logits = bigram(1)[[0, 1, 2, 3]]
    for seed in range(200):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [], SIZE)
        draft = np.random.default_rng(seed).integers(0, SIZE, 3)
        assert sampler.accept(Scores(logits), draft, logits[:3], None)[0] == 3


def test_a_drafted_token_the_target_excludes_is_never_emitted():
    logits = bigram(2)[:2]
    draft = int(logits[0].argsort()[-2])
    draft_logits = rows_for([draft])
    for seed in range(100):
        sampler = Sampler(SamplingParams(temperature=1.0, top_k=1, seed=seed), [], SIZE)
        assert sampler.accept(Scores(logits), np.array([draft]), draft_logits, None) == (0, [int(logits[0].argmax())])


@given(
    seed=st.integers(0, 1000),
    draft=st.lists(st.integers(0, SIZE - 1), max_size=5),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    chosen=st.booleans(),
)
def test_a_round_emits_its_accepted_tokens_and_one_more(seed, draft, temperature, chosen):
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2, (len(draft) + 1, SIZE)).astype(np.float32)
    draft_logits = None if chosen else random.normal(0, 2, (len(draft), SIZE)).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), [], SIZE)
    accepted, emitted = sampler.accept(Scores(logits), np.array(draft, np.int64), draft_logits, None)
    assert 0 <= accepted <= len(draft)
    assert len(emitted) == accepted + 1
    assert emitted[:accepted] == draft[:accepted]
    assert all(type(token) is int and 0 <= token < SIZE for token in emitted)


# --- penalties ---

PENALTIES = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.6},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {1: 1.0, 5: -2.0}},
]


def naive_greedy(table: np.ndarray, prompt: list[int], options: dict, length: int) -> list[int]:
    output: list[int] = []
    for _ in range(length):
        row = table[(prompt + output)[-1]].astype(np.float64)
        for token, bias in options.get("logit_bias", {}).items():
            row[token] += bias
        for token in set(prompt + output):
            penalty = options.get("repetition_penalty", 1.0)
            row[token] *= penalty if row[token] < 0 else 1 / penalty
        for token in set(output):
            row[token] -= options.get("presence_penalty", 0) + options.get("frequency_penalty", 0) * output.count(token)
        output.append(int(row.argmax()))
    return output


@pytest.mark.parametrize("options", PENALTIES, ids=str)
@pytest.mark.parametrize("hits", [0, 2, 4])
def test_penalties_inside_a_block_equal_decoding_one_at_a_time(options, hits):
    table, prompt = bigram(5) / 4 + 1, [0, 4, 4]
    expected = naive_greedy(table, prompt, options, 60)
    sampler, output = Sampler(SamplingParams(**options), prompt, SIZE), []
    lengths = set()
    while len(output) < 50:
        draft = expected[len(output) : len(output) + 4]
        if hits < 4:
            draft[hits] = (draft[hits] + 1) % SIZE
        accepted, emitted = sampler.accept(Scores(table[[(prompt + output)[-1], *draft]]), np.array(draft), None, None)
        lengths.add(accepted)
        output += emitted
    assert output == expected[: len(output)]
    assert lengths == {hits}
    assert expected != naive_greedy(table, prompt, {}, 60)

    sampler, output = Sampler(SamplingParams(**options), prompt, SIZE), []
    for _ in range(50):
        output.append(sampler.next_token(Scores(table[(prompt + output)[-1]][None])))
    assert output == expected[:50]


# --- stop tokens ---


@pytest.mark.parametrize("slot", range(5))
@pytest.mark.parametrize("params", [SamplingParams(), WARM], ids=["greedy", "sampled"])
def test_nothing_follows_a_stop_token(slot, params):
    own = [1, 2, 3, 4, 5]
    own[slot] = 7
    sampler = Sampler(params, [], SIZE, frozenset({6, 7}))
    logits = rows_for(own) * 3
    accepted, emitted = sampler.accept(Scores(logits), np.array(own[:4]), logits[:4], None)
    assert emitted == own[: slot + 1]
    assert accepted == min(slot + 1, 4)


def test_a_stop_token_that_is_rejected_stops_nothing():
    sampler = Sampler(SamplingParams(), [], SIZE, frozenset({7}))
    assert sampler.accept(Scores(rows_for([1, 2])), np.array([7]), None, None) == (0, [1])


def test_rows_behind_a_stop_token_are_not_read():
    logits = rows_for([7, 1])
    logits[1] = np.nan
    assert Sampler(WARM, [], SIZE, frozenset({7})).accept(Scores(logits), np.array([7]), logits[:1], None) == (1, [7])


# --- values that are no numbers ---


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [SamplingParams(), WARM, SamplingParams(repetition_penalty=2.0)], ids=str)
@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("token", [0, 2, SIZE - 1])
def test_a_target_logit_that_is_not_finite_is_an_error(bad, params, row, token):
    logits = rows_for([2, 2, 2]) * 3
    logits[row, token] = bad
    with pytest.raises(NumericalError, match=f"target's logits of slot {row}: the logit of token {token} is {bad}"):
        Sampler(params, [2], SIZE).accept(Scores(logits), np.array([2, 2]), None, None)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_draft_logit_that_is_not_finite_is_an_error(bad):
    logits = rows_for([2, 2, 2]) * 3
    draft_logits = logits[:2].copy()
    draft_logits[1, 3] = bad
    with pytest.raises(NumericalError, match="drafter's logits of slot 1: the logit of token 3"):
        Sampler(WARM, [], SIZE).accept(Scores(logits), np.array([2, 2]), draft_logits, None)


@pytest.mark.parametrize("params", [SamplingParams(), WARM], ids=["greedy", "sampled"])
def test_rows_behind_a_rejection_are_not_read(params):
    logits = rows_for([2, 2, 2]) * 3
    logits[1:] = np.nan
    draft_logits = np.full((2, SIZE), np.nan, np.float32)
    draft_logits[0] = rows_for([5])
    assert Sampler(params, [], SIZE).accept(Scores(logits), np.array([5, 5]), draft_logits, None) == (0, [2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_finite_logits_of_any_size_are_no_error(temperature):
    largest = np.finfo(np.float32).max
    logits = np.array([[largest, -largest, 0, largest / 2]], np.float32)
    assert Sampler(SamplingParams(temperature=temperature), [], 4).next_token(Scores(logits[:1])) == 0


# --- seeds ---


def emitted_by(seed: int | None, rounds: int = 12) -> list[int]:
    target, draft = bigram(4), bigram(5)
    sampler, output = Sampler(SamplingParams(temperature=1.0, seed=seed), [], SIZE), [0]
    for _ in range(rounds):
        chain = [output[-1]]
        for uniform in sampler.draft_uniforms(3):
            weights = np.exp(draft[chain[-1]])
            chain.append(int(np.searchsorted(np.cumsum(weights / weights.sum()), uniform)))
        output += sampler.accept(Scores(target[chain]), np.array(chain[1:]), draft[chain[:3]], None)[1]
    return output


def test_a_seed_fixes_everything():
    assert emitted_by(9) == emitted_by(9)
    assert emitted_by(9) != emitted_by(10)
    assert emitted_by(None) != emitted_by(None)


def test_the_streams_differ():
    sampler = Sampler(WARM, [], SIZE)
    streams = (sampler._draft_stream, sampler._accept_stream, sampler._recovery_stream)
    draws = np.array([stream.random(50) for stream in streams])
    assert np.abs(np.corrcoef(draws) - np.eye(3)).max() < 0.5


def test_draws_do_not_depend_on_what_was_accepted():
    logits, draft = bigram(6)[:4], np.array([3, 3, 3])
    continuations = []
    for first_draft_logits in (rows_for([3, 3, 3]), bigram(6)[:3]):  # rejected early, accepted whole
        sampler = Sampler(SamplingParams(temperature=1.0, seed=2), [], SIZE)
        sampler.accept(Scores(logits), draft, first_draft_logits, None)
        continuations.append([sampler.accept(Scores(logits), draft, bigram(7)[:3], None) for _ in range(10)])
    assert continuations[0] == continuations[1]


def test_draft_uniforms_stay_below_one():
    uniforms = Sampler(WARM, [], SIZE).draft_uniforms(200_000)
    assert uniforms.dtype == np.float32
    assert uniforms.shape == (200_000,)
    assert 0 <= uniforms.min() < 1e-4
    assert 1 - 1e-4 < uniforms.max() < 1


def test_the_draft_shares_the_temperature():
    assert Sampler(SamplingParams(), [], SIZE).draft_temperature == 0
    assert Sampler(SamplingParams(temperature=9e-6), [], SIZE).draft_temperature == 0
    assert Sampler(SamplingParams(temperature=0.3), [], SIZE).draft_temperature == 0.3
