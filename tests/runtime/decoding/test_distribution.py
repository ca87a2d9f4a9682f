"""The target's distribution, shaped by sampling options."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.decoding.distribution import Distribution, shaped
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.decoding.scores import Scores
from tests.support.shaping import distribution, reference

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
