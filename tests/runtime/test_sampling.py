"""Sampling options, the distribution they make, and that speculation draws from exactly that distribution."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError
from scipy import stats

from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.decoding.distribution import Distribution, shaped
from dspark.runtime.decoding.penalties import Penalties
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.decoding.scores import Scores
from dspark.runtime.errors import RequestError


def reference(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int] = (), generated: Sequence[int] = ()
) -> np.ndarray:
    """The target's distribution in float64, one rule after the other, written for reading."""
    x = [float(value) for value in logits]
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *generated}:
        x[token] = x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
    for token in set(generated):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(generated).count(token)
    ranking = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.temperature < 1e-5:
        ranking = ranking[:1]
    if params.top_k:
        ranking = ranking[: params.top_k]
    temperature = max(params.temperature, 1e-5)
    weights = {token: math.exp((x[token] - x[ranking[0]]) / temperature) for token in ranking}
    total, before, nucleus = sum(weights.values()), 0.0, {}
    for token in ranking:
        if before / total < params.top_p:
            nucleus[token] = weights[token]
        before += weights[token]
    kept = {token: weight for token, weight in nucleus.items() if weight >= params.min_p}
    p = np.zeros(len(x))
    p[list(kept)] = np.array(list(kept.values())) / sum(kept.values())
    return p


def distribution(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int] = (), generated: Sequence[int] = ()
) -> np.ndarray:
    penalties = Penalties(params, prompt, len(logits))
    for token in generated:
        penalties.record(token)
    return shaped(penalties.apply(logits), params).dense(len(logits))


# --- options ---


def test_defaults_are_greedy_and_unshaped():
    params = SamplingParams()
    assert params.greedy
    assert params.max_new_tokens == 128
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_parse_overrides_only_what_it_is_given():
    base = SamplingParams(temperature=0.7, top_k=5, stop=("a",), seed=3)
    row = {"top_p": 0.5, "stop": "END", "logit_bias": {"7": -1, 8: 2.5}, "seed": None, "temperature": 1}
    params = SamplingParams.parse(base, row)
    assert params == SamplingParams(
        temperature=1.0, top_k=5, top_p=0.5, stop=("END",), logit_bias={7: -1.0, 8: 2.5}, seed=None
    )
    assert SamplingParams.parse(base, {"stop": ["x", "y"]}).stop == ("x", "y")
    assert SamplingParams.parse(base, {}) == base


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("max_new_tokens", 0, "greater than or equal to 1"),
        ("max_new_tokens", 1.5, "integer"),
        ("max_new_tokens", True, "integer"),
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "warm", "number"),
        ("temperature", None, "number"),
        ("top_k", -1, "greater than or equal to 0"),
        ("top_p", 0.0, "greater than 0"),
        ("top_p", 1.01, "less than or equal to 1"),
        ("min_p", 1.01, "less than or equal to 1"),
        ("min_p", -0.01, "greater than or equal to 0"),
        ("repetition_penalty", 0.0, "greater than or equal to 0.001"),
        ("temperature", 1e9, "less than or equal to 1000"),
        ("presence_penalty", math.nan, "finite"),
        ("frequency_penalty", -math.inf, "finite"),
        ("logit_bias", {"x": 1.0}, "integer"),
        ("logit_bias", {-1: 1.0}, "greater than or equal to 0"),
        ("logit_bias", {1: math.inf}, "finite"),
        ("logit_bias", [1], "dict"),
        ("stop", "", "at least 1 character"),
        ("stop", ["a", ""], "at least 1 character"),
        ("stop", 5, "tuple"),
        ("seed", -1, "greater than or equal to 0"),
    ],
)
def test_a_bad_value_is_refused_with_option_value_and_rule(option, value, rule):
    with pytest.raises(RequestError, match=option) as caught:
        SamplingParams.parse(SamplingParams(), {option: value})
    assert rule in str(caught.value)
    with pytest.raises(ValidationError):
        SamplingParams(**{option: value})


def test_the_error_shows_the_value():
    with pytest.raises(RequestError, match=r"^sampling option top_p = 7: must be less than or equal to 1$"):
        SamplingParams.parse(SamplingParams(), {"top_p": 7})


def test_an_unknown_option_is_refused_with_the_nearest_one():
    with pytest.raises(RequestError, match=r"^unknown sampling option 'temprature'; did you mean 'temperature'\?$"):
        SamplingParams.parse(SamplingParams(), {"temprature": 1.0})
    with pytest.raises(RequestError, match="unknown sampling option 'zzz'; there are: max_new_tokens, temperature"):
        SamplingParams.parse(SamplingParams(), {"zzz": 1.0})


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(RequestError, match="logit_bias names token 8; the vocabulary ends at 7"):
        Sampler(SamplingParams(logit_bias={8: 1.0}), [], 8)


# --- the target's distribution ---

SHAPES = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.2, "min_p": 0.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.8},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "presence_penalty": -0.7, "frequency_penalty": -0.4},
    {"temperature": 1.0, "logit_bias": {0: 5.0, 3: -5.0, 11: -100.0}},
    {"temperature": 0.7, "top_k": 30, "top_p": 0.97, "repetition_penalty": 1.1, "logit_bias": {2: 1.0}},
    {
        "temperature": 0.7,
        "top_k": 25,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {4: 2.0},
    },
    {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {7: 1.5}},
]


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_shaping_equals_the_naive_reference(options):
    params = SamplingParams(**options)
    for seed, size in enumerate((12, 60, 500)):
        random = np.random.default_rng(seed)
        logits = random.normal(0, 3, size).astype(np.float32)
        prompt, generated = random.integers(0, size, 6).tolist(), random.integers(0, 12, 9).tolist()
        expected = reference(logits, params, prompt, generated)
        np.testing.assert_allclose(distribution(logits, params, prompt, generated), expected, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    # transformers has no presence and frequency penalties
    [options for options in SHAPES if options["temperature"] > 0 and "presence_penalty" not in options],
    ids=str,
)
def test_shaping_equals_transformers(options):
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    params = SamplingParams(**options)
    random = np.random.default_rng(5)
    logits = random.normal(0, 3, 300).astype(np.float32)
    prompt, generated = random.integers(0, 300, 6).tolist(), random.integers(0, 12, 9).tolist()
    chain = processors.LogitsProcessorList()
    if params.logit_bias:
        chain.append(processors.SequenceBiasLogitsProcessor([[[t], b] for t, b in params.logit_bias.items()]))
    if params.repetition_penalty != 1:
        chain.append(processors.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(processors.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(processors.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(processors.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(processors.MinPLogitsWarper(params.min_p))
    scores = chain(torch.tensor([prompt + generated]), torch.from_numpy(logits)[None])
    expected = torch.softmax(scores[0].double(), -1).numpy()
    np.testing.assert_allclose(distribution(logits, params, prompt, generated), expected, rtol=2e-5, atol=1e-9)


def test_ties_keep_the_lowest_ids():
    logits = np.array([1, 2, 2, 0, 2, 1, 2], np.float32)
    assert np.flatnonzero(distribution(logits, SamplingParams(temperature=1.0, top_k=3))).tolist() == [1, 2, 4]
    assert np.flatnonzero(distribution(logits, SamplingParams(temperature=1.0, top_p=0.3))).tolist() == [1, 2]
    assert np.flatnonzero(distribution(logits, SamplingParams())).tolist() == [1]
    flat = np.zeros(1000, np.float32)
    assert np.flatnonzero(distribution(flat, SamplingParams(temperature=1.0, top_p=1e-20))).tolist() == [0]


@pytest.mark.parametrize("bias", [1e30, 1e300, -1e30, -1e300])
@pytest.mark.parametrize("temperature", [1e-5, 0.5, 1.0])
def test_a_bias_beyond_float32_forces_or_forbids(bias, temperature):
    logits = np.array([0, 1, 0.5], np.float32)
    p = distribution(logits, SamplingParams(temperature=temperature, logit_bias={0: bias}))
    assert p.sum() == pytest.approx(1)
    assert p[0] == (1 if bias > 0 else 0)


def test_the_penalties_leave_the_logits_alone():
    logits = np.ones(4, np.float32)
    distribution(logits, SamplingParams(repetition_penalty=2.0, logit_bias={1: 4.0}), prompt=[0])
    np.testing.assert_array_equal(logits, np.ones(4, np.float32))


# On a grid, so that different logits stay different after rounding.
GRID = st.integers(-3840, 3840).map(lambda n: n / 128) | st.integers(-2, 2).map(float)
LOGITS = arrays(np.float32, st.integers(1, 40), elements=GRID)
OPTIONS = st.builds(
    SamplingParams,
    temperature=st.floats(1e-5, 4),
    top_k=st.integers(0, 45),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 1),
)


@given(LOGITS, OPTIONS)
def test_a_distribution_keeps_the_support_rules(logits, params):
    p = shaped(logits, params).dense(len(logits))
    assert p.sum() == pytest.approx(1, abs=1e-9)
    assert (p >= 0).all()
    assert p[logits.argmax()] == p.max() > 0
    support = np.flatnonzero(p)
    if params.top_k:
        assert len(support) <= params.top_k
    assert (p[support] >= params.min_p * p.max() * (1 - 1e-6)).all()
    if len(support) < len(logits):  # what is kept is at least as likely as what is not
        assert logits[support].min() >= np.delete(logits, support).max()


@given(LOGITS, st.floats(0.4, 4), st.floats(1e-6, 1))
def test_the_nucleus_is_the_smallest_set_with_its_mass(logits, temperature, top_p):
    whole = shaped(logits, SamplingParams(temperature=temperature)).dense(len(logits))
    kept = whole[shaped(logits, SamplingParams(temperature=temperature, top_p=top_p)).dense(len(logits)) > 0]
    assert kept.sum() >= top_p - 1e-6
    assert kept.sum() - kept.min() < top_p + 1e-6


@given(LOGITS, st.integers(0, 45), st.floats(1e-6, 1), st.floats(0, 1))
def test_greedy_is_the_argmax_whatever_else_is_asked(logits, top_k, top_p, min_p):
    sampler = Sampler(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p), [], len(logits))
    assert sampler.next_token(Scores(logits[None])) == logits.argmax()


@given(arrays(np.float64, st.integers(1, 20), elements=st.sampled_from([0.0, 1e-300, 0.5, 1.0])), st.floats(0, 1))
def test_a_draw_has_weight(weights, uniform):
    weights[len(weights) // 2] = 1.0
    uniform = min(uniform, math.nextafter(1, 0))
    assert weights[Distribution(weights).draw(uniform)] > 0
    assert weights[Distribution(weights).draw(0.0)] > 0


# --- losslessness: χ² of speculative sampling against p ---

SIZE = 6
ANCHOR = 2
PROMPT = (1, 2)
TRIALS = 2000
TARGET = (
    np.random.default_rng(11).normal(0, 1.5, (SIZE, SIZE)).astype(np.float32)
)  # next-token logits of a bigram model
DRAFT = np.random.default_rng(12).normal(0, 1.5, (SIZE, SIZE)).astype(np.float32)
REDUCED = np.array([4, 0, 3])  # draft id → target id
DISJOINT = np.where(np.arange(SIZE) < 3, np.float32(0), np.float32(-80))


def inverse_cdf(logits: np.ndarray, temperature: float, uniform: float) -> int:
    scaled = logits / np.float32(temperature)
    weights = np.exp(scaled - scaled.max())
    return min(int(np.searchsorted(np.cumsum(weights / weights.sum()), uniform, side="right")), len(weights) - 1)


def first_two_tokens(
    params: SamplingParams,
    target: np.ndarray = TARGET,
    draft: np.ndarray = DRAFT,
    vocabulary: np.ndarray | None = None,
    chosen: bool = False,
    shown: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    share: Callable[[Sampler, int], None] = lambda sampler, seed: None,
) -> np.ndarray:
    """Counts `[V, V]` of the first two tokens over many requests, with blocks of 0 to 3 draft tokens.

    Args:
        params: Options; each request gets its own seed.
        target: The target's bigram logits.
        draft: The drafter's.
        vocabulary: A reduced draft vocabulary.
        chosen: The draft takes its likeliest token instead of drawing one.
        shown: What the accept rule sees of the draft logits (to break it).
        share: Rewires the sampler's random streams (to break them).
    """
    counts = np.zeros((SIZE, SIZE))
    for seed in range(TRIALS):
        sampler = Sampler(params.model_copy(update={"seed": seed}), PROMPT, SIZE)
        share(sampler, seed)
        tokens: list[int] = []
        length = seed % 4
        while len(tokens) < 2:
            chain, rows = [(tokens or [ANCHOR])[-1]], []
            for uniform in sampler.draft_uniforms(length):
                row = draft[chain[-1]]
                index = (
                    int(row.argmax())
                    if chosen or sampler.greedy
                    else inverse_cdf(row, sampler.draft_temperature, uniform)
                )
                rows.append(row)
                chain.append(index if vocabulary is None else int(vocabulary[index]))
            draft_logits = None if chosen else shown(np.array(rows, np.float32).reshape(length, draft.shape[1]))
            draft_ids = None if vocabulary is None else np.tile(vocabulary, (length, 1))
            tokens += sampler.accept(Scores(target[chain]), np.array(chain[1:], np.int64), draft_logits, draft_ids)[1]
        counts[tokens[0], tokens[1]] += 1
    return counts


def p_value(counts: np.ndarray, params: SamplingParams, target: np.ndarray = TARGET) -> float:
    first = reference(target[ANCHOR], params, PROMPT)
    second = [reference(target[token], params, PROMPT, [token]) for token in range(SIZE)]
    expected = (first[:, None] * np.array(second)).ravel() * counts.sum()
    observed = counts.ravel()
    assert not observed[expected == 0].any(), "a token outside the support was emitted"
    order = np.argsort(expected)
    rare = order[: np.searchsorted(np.cumsum(expected[order]), 8) + 1]  # χ² wants no nearly empty cells: pool them
    common = np.setdiff1d(np.arange(SIZE * SIZE), rare)
    observed = np.append(observed[common], observed[rare].sum())
    expected = np.append(expected[common], expected[rare].sum())
    return float(stats.chisquare(observed, expected).pvalue) if len(expected) > 1 else 1.0


DRAFTERS = {
    "full": {},
    "reduced": {"vocabulary": REDUCED, "draft": DRAFT[:, :3]},
    "chosen": {"chosen": True},
    "equal": {"draft": TARGET},
    "disjoint": {"target": TARGET + DISJOINT, "draft": DRAFT + DISJOINT[::-1]},
}


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        ({"temperature": 1.0}, "full"),
        ({"temperature": 0.6}, "full"),
        ({"temperature": 1.7}, "full"),
        ({"temperature": 1.0, "top_k": 3}, "full"),
        ({"temperature": 1.0, "top_p": 0.7}, "full"),
        ({"temperature": 1.3, "min_p": 0.2}, "full"),
        ({"temperature": 1.0, "repetition_penalty": 1.8}, "full"),
        ({"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {3: 1.5}}, "full"),
        ({"temperature": 0.0}, "full"),
        ({"temperature": 1e-5}, "full"),
        ({"temperature": 1.0}, "reduced"),
        ({"temperature": 0.9, "top_k": 5, "top_p": 0.9, "min_p": 0.05}, "reduced"),
        ({"temperature": 1.0}, "chosen"),
        ({"temperature": 0.8, "top_p": 0.8}, "chosen"),
        ({"temperature": 1.0}, "equal"),
        ({"temperature": 0.7}, "equal"),
        ({"temperature": 1.0}, "disjoint"),
    ],
    ids=str,
)
def test_speculation_draws_from_the_targets_distribution(options, drafter):
    params = SamplingParams(**options)
    counts = first_two_tokens(params, **DRAFTERS[drafter])
    assert p_value(counts, params, DRAFTERS[drafter].get("target", TARGET)) > 1e-4


def test_q_from_another_array_is_caught():
    params = SamplingParams(temperature=1.0)
    assert p_value(first_two_tokens(params, shown=lambda rows: rows[:, ::-1]), params) < 1e-4


def test_another_temperature_on_one_side_is_caught():
    params = SamplingParams(temperature=1.0)
    assert p_value(first_two_tokens(params, shown=lambda rows: rows / 2), params) < 1e-4


def test_a_chosen_draft_taken_for_a_drawn_one_is_caught():
    params = SamplingParams(temperature=1.0)

    def choose(sampler: Sampler, seed: int) -> None:
        sampler.draft_uniforms = lambda count: np.full(count, 0.5, np.float32)

    assert p_value(first_two_tokens(params, share=choose), params) < 1e-4


@pytest.mark.parametrize("stream", ["_recovery_stream", "_accept_stream"])
def test_a_stream_shared_with_the_draft_is_caught(stream):
    params = SamplingParams(temperature=1.0)

    def share(sampler: Sampler, seed: int) -> None:
        draft = np.random.default_rng(seed)
        sampler.draft_uniforms = lambda count: draft.random(count)
        setattr(sampler, stream, np.random.default_rng(seed))

    assert p_value(first_two_tokens(params, share=share), params) < 1e-4
