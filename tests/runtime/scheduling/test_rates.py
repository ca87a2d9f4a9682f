"""Acceptance rates by position, learned from rounds."""

import numpy as np
import pytest

from dspark.runtime.decoding.rounds import Round
from dspark.runtime.scheduling.rates import AcceptanceRates


def outcomes(generator: np.random.Generator, rates: list[float], verified: int, count: int) -> list[Round]:
    stands = np.logical_and.accumulate(generator.random((count, verified)) < rates[:verified], axis=1).sum(axis=1)
    return [Round(verified, int(accepted), False, None) for accepted in stands]


def test_rates_approach_the_drafters() -> None:
    truth, generator = [0.9, 0.7, 0.5], np.random.default_rng(0)
    rates = AcceptanceRates(3)
    for _ in range(300):
        rates.update(outcomes(generator, truth, 3, 16))
    np.testing.assert_allclose(rates.values, truth, atol=0.06)


def test_a_position_that_is_verified_no_more_is_believed_in_again() -> None:
    generator = np.random.default_rng(0)
    rates = AcceptanceRates(2)
    for _ in range(100):
        rates.update(outcomes(generator, [0.9, 0.1], 2, 4))
    assert rates.values[1] < 0.2
    for _ in range(600):
        rates.update(outcomes(generator, [0.9, 0.1], 1, 4))
    assert rates.values[1] > 0.7


def test_what_is_behind_a_stop_token_is_no_rejection() -> None:
    rates, before = AcceptanceRates(3), AcceptanceRates(3).values
    rates.update([Round(3, 1, True, None)])
    assert rates.values[0] > before[0]
    assert rates.values[1:].tolist() == pytest.approx(before[1:].tolist())
