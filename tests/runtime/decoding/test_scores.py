"""Scores: what the graph found on the device says the same as the logits, which are read only when asked for."""

import numpy as np
import pytest

from dspark.runtime.decoding.scores import Scores
from dspark.runtime.errors import NumericalError

LOGITS = np.random.default_rng(0).normal(0, 3, (5, 40)).astype(np.float32)
LARGEST = np.finfo(np.float32).max


class OnDevice:
    """An array that counts how often it is copied to the host."""

    def __init__(self, values: np.ndarray, reads: list[tuple[int, ...]]) -> None:
        self.values, self.reads = values, reads
        self.shape, self.dtype, self.nbytes = values.shape, values.dtype, values.nbytes

    def __getitem__(self, index: slice) -> "OnDevice":
        return OnDevice(self.values[index], self.reads)

    def __setitem__(self, index: object, values: object) -> None:
        raise AssertionError("scores are not written")

    def read(self) -> np.ndarray:
        self.reads.append(self.shape)
        return self.values.copy()


def on_device(logits: np.ndarray) -> tuple[Scores, list[tuple[int, ...]]]:
    """As a target that looks for the likeliest tokens itself returns them."""
    reads: list[tuple[int, ...]] = []
    with np.errstate(over="ignore", invalid="ignore"):
        return Scores(OnDevice(logits, reads), logits.argmax(axis=1), logits.sum(axis=1)), reads


def test_the_likeliest_tokens_need_no_logits() -> None:
    scores, reads = on_device(LOGITS)
    part = scores.part(1, 4)
    assert [part.likeliest(index) for index in range(3)] == LOGITS[1:4].argmax(axis=1).tolist()
    assert all(part.finite(index) for index in range(3))
    assert reads == []


def test_rows_are_read_together_and_once() -> None:
    scores, reads = on_device(LOGITS)
    part = scores.part(1, 4)
    for index in (0, 2, 0):
        np.testing.assert_array_equal(part.row(index), LOGITS[1 + index])
    assert reads == [(3, 40)]


def test_on_the_host_the_logits_are_all_there_is() -> None:
    part = Scores(LOGITS).part(2, 5)
    assert [part.likeliest(index) for index in range(3)] == LOGITS[2:].argmax(axis=1).tolist()
    assert np.shares_memory(part.rows, LOGITS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("device", [True, False])
def test_a_row_that_is_not_finite_is_refused_alone(value: float, device: bool) -> None:
    logits = LOGITS.copy()
    logits[2, 7] = value
    scores = on_device(logits)[0] if device else Scores(logits)
    assert [scores.finite(index) for index in range(5)] == [True, True, False, True, True]
    assert scores.likeliest(1) == logits[1].argmax()
    with pytest.raises(NumericalError, match=r"slot 2: the logit of token 7 is .*not a finite number"):
        scores.likeliest(2)
    with pytest.raises(NumericalError, match="slot 2"):
        scores.row(2)


@pytest.mark.parametrize("device", [True, False])
def test_finite_logits_whose_sum_overflows_are_finite(device: bool) -> None:
    logits = LOGITS.copy()
    logits[3] = LARGEST / 2
    logits[3, 11] = LARGEST
    scores = on_device(logits)[0] if device else Scores(logits)
    assert scores.likeliest(3) == 11
