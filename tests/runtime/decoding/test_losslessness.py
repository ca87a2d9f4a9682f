"""Speculative sampling draws from the target's distribution: χ² over many requests, and the faults it catches."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.decoding.scores import Scores
from tests.support.shaping import reference

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
