"""Schedulers that know neither hardware nor history."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dspark.runtime.scheduling.scheduler import Batch, FixedScheduler, ThresholdScheduler

WIDTH = 5
probabilities = st.floats(0, 1, width=32)
rounds = st.integers(1, 6).flatmap(
    lambda requests: st.tuples(
        arrays(np.float32, (requests, WIDTH), elements=probabilities),
        arrays(np.int64, requests, elements=st.integers(0, WIDTH)),
    )
)


def batch(limits: np.ndarray | list[int]) -> Batch:
    limits = np.asarray(limits)
    return Batch(limits, np.zeros(len(limits), bool), 64)


def prefix_length(confidence: list[float], threshold: float, limit: int) -> int:
    length = 0
    while length < limit and np.float32(confidence[length]) >= np.float32(threshold):
        length += 1
    return length


@given(rounds, probabilities)
def test_threshold_equals_brute_force(confidence_and_limits: tuple[np.ndarray, np.ndarray], threshold: float) -> None:
    confidence, limits = confidence_and_limits
    lengths = ThresholdScheduler(threshold).schedule(confidence, batch(limits))
    assert lengths.dtype == np.int64
    expected = [
        prefix_length(row, threshold, limit) for row, limit in zip(confidence.tolist(), limits.tolist(), strict=True)
    ]
    assert lengths.tolist() == expected


@given(rounds, probabilities, probabilities)
def test_a_higher_threshold_never_verifies_more(
    confidence_and_limits: tuple[np.ndarray, np.ndarray], one: float, other: float
) -> None:
    confidence, limits = confidence_and_limits
    low, high = (ThresholdScheduler(t).schedule(confidence, batch(limits)) for t in sorted((one, other)))
    assert (high <= low).all()


@given(rounds, probabilities, st.integers(0, 2**32 - 1))
def test_what_comes_after_the_cut_does_not_matter(
    confidence_and_limits: tuple[np.ndarray, np.ndarray], threshold: float, seed: int
) -> None:
    """The decision to stop at ℓ sees c_1 … c_{ℓ + 1}, which depend on tokens up to x_ℓ only: it does not anticipate."""
    confidence, limits = confidence_and_limits
    lengths = ThresholdScheduler(threshold).schedule(confidence, batch(limits))
    later = np.arange(WIDTH) > lengths[:, None]
    other = np.where(later, np.random.default_rng(seed).random(confidence.shape), confidence).astype(np.float32)
    assert ThresholdScheduler(threshold).schedule(other, batch(limits)).tolist() == lengths.tolist()


@given(rounds)
def test_fixed_verifies_all_that_a_request_can_use(confidence_and_limits: tuple[np.ndarray, np.ndarray]) -> None:
    confidence, limits = confidence_and_limits
    assert FixedScheduler().schedule(confidence, batch(limits)).tolist() == limits.tolist()
    assert FixedScheduler().schedule(None, batch(limits)).tolist() == limits.tolist()


def test_a_confidence_at_the_threshold_is_enough() -> None:
    confidence = np.array([[0.6, 0.6, np.nextafter(np.float32(0.6), np.float32(0))]], np.float32)
    assert ThresholdScheduler(0.6).schedule(confidence, batch([3])).tolist() == [2]


def test_a_confidence_that_is_no_number_is_not_enough() -> None:
    confidence = np.array([[1.0, np.nan, 1.0]], np.float32)
    assert ThresholdScheduler(0.0).schedule(confidence, batch([3])).tolist() == [1]
