"""Which prefix of a draft is verified, and that choosing it does not bend the output's distribution."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from dspark.runtime.acceptance import Sampler
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.scheduler import FixedScheduler, ThresholdScheduler

WIDTH = 5
probabilities = st.floats(0, 1, width=32)
rounds = st.integers(1, 6).flatmap(
    lambda requests: st.tuples(
        arrays(np.float32, (requests, WIDTH), elements=probabilities),
        arrays(np.int64, requests, elements=st.integers(0, WIDTH)),
    )
)


def prefix_length(confidence: list[float], threshold: float, limit: int) -> int:
    length = 0
    while length < limit and np.float32(confidence[length]) >= np.float32(threshold):
        length += 1
    return length


@given(rounds, probabilities)
def test_threshold_equals_brute_force(confidence_and_limits: tuple[np.ndarray, np.ndarray], threshold: float) -> None:
    confidence, limits = confidence_and_limits
    lengths = ThresholdScheduler(threshold).schedule(confidence, limits)
    assert lengths.dtype == np.int64
    expected = [
        prefix_length(row, threshold, limit) for row, limit in zip(confidence.tolist(), limits.tolist(), strict=True)
    ]
    assert lengths.tolist() == expected


@given(rounds, probabilities, probabilities)
def test_a_higher_threshold_never_verifies_more(
    confidence_and_limits: tuple[np.ndarray, np.ndarray], one: float, other: float
) -> None:
    low, high = (ThresholdScheduler(t).schedule(*confidence_and_limits) for t in sorted((one, other)))
    assert (high <= low).all()


@given(rounds, probabilities, st.integers(0, 2**32 - 1))
def test_what_comes_after_the_cut_does_not_matter(
    confidence_and_limits: tuple[np.ndarray, np.ndarray], threshold: float, seed: int
) -> None:
    """The decision to stop at ℓ sees c_1 … c_{ℓ + 1}, which depend on tokens up to x_ℓ only: it does not anticipate."""
    confidence, limits = confidence_and_limits
    lengths = ThresholdScheduler(threshold).schedule(confidence, limits)
    later = np.arange(WIDTH) > lengths[:, None]
    other = np.where(later, np.random.default_rng(seed).random(confidence.shape), confidence).astype(np.float32)
    assert ThresholdScheduler(threshold).schedule(other, limits).tolist() == lengths.tolist()


@given(rounds)
def test_fixed_verifies_all_that_a_request_can_use(confidence_and_limits: tuple[np.ndarray, np.ndarray]) -> None:
    confidence, limits = confidence_and_limits
    assert FixedScheduler().schedule(confidence, limits).tolist() == limits.tolist()
    assert FixedScheduler().schedule(None, limits).tolist() == limits.tolist()


def test_a_confidence_at_the_threshold_is_enough() -> None:
    confidence = np.array([[0.6, 0.6, np.nextafter(np.float32(0.6), np.float32(0))]], np.float32)
    assert ThresholdScheduler(0.6).schedule(confidence, np.array([3])).tolist() == [2]


def test_a_confidence_that_is_no_number_is_not_enough() -> None:
    confidence = np.array([[1.0, np.nan, 1.0]], np.float32)
    assert ThresholdScheduler(0.0).schedule(confidence, np.array([3])).tolist() == [1]


# The counterexample of the DSpark paper (SEMANTICS: hardware-aware prefix scheduler): two tokens, A = 0 and B = 1.

P = np.array([0.7, 0.3])
Choose = Callable[[np.ndarray], int]


def threshold(value: float) -> Choose:
    scheduler = ThresholdScheduler(value)
    return lambda confidence: int(scheduler.schedule(confidence[None], np.array([2]))[0])


def retrospective(confidence: np.ndarray) -> int:
    """Searches all prefix lengths for the best expected tokens a second."""
    expected = 1 + np.concatenate(([0], np.cumsum(np.cumprod(confidence))))
    return int(np.argmax(expected * (1, 0.5, 0.45)))


def p_value(choose: Choose, draws: int) -> float:
    """Of the first tokens of many rounds, against P."""
    logits = np.log(np.tile(P, (3, 1))).astype(np.float32)
    draft_logits = np.zeros((2, 2), np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=7), [], 2)
    drafts = np.random.default_rng(8).integers(0, 2, (draws, 2))
    lengths = [choose(np.array([0.8, 0.9 if first == 0 else 0.0], np.float32)) for first in (0, 1)]
    counts = np.zeros(2, int)
    for draft in drafts:
        length = lengths[draft[0]]
        counts[sampler.accept(logits[: length + 1], draft[:length], draft_logits[:length], None)[1][0]] += 1
    return float(stats.chisquare(counts, draws * P).pvalue)


@pytest.mark.parametrize("draws", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", [0.5, 0.85])
def test_a_threshold_keeps_the_distribution(value: float, draws: int) -> None:
    assert p_value(threshold(value), draws) > 1e-3


def test_a_retrospective_search_would_be_caught() -> None:
    assert p_value(retrospective, 10_000) < 1e-9
