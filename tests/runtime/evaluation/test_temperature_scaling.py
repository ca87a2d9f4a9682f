"""Sequential temperature scaling finds the temperatures that bent the confidences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dspark.runtime.bundle.calibration import confidences
from dspark.runtime.decoding.rounds import Round, RoundTable
from dspark.runtime.evaluation.temperature_scaling import TEMPERATURES, fit_temperatures, survival_errors


def synthetic(temperatures: NDArray[np.float64], count: int, seed: int) -> RoundTable:
    """Rounds whose honest logits were multiplied by temperatures: dividing by these again is right."""
    random = np.random.default_rng(seed)
    honest = random.normal(0.8, 1.5, (count, len(temperatures)))
    stands = random.random(honest.shape) < 1 / (1 + np.exp(-honest))
    accepted = np.logical_and.accumulate(stands, axis=1).sum(axis=1).tolist()
    rounds = [
        Round(len(temperatures), length, False, (row * temperatures).astype(np.float32))
        for length, row in zip(accepted, honest, strict=True)
    ]
    return RoundTable.of(rounds, len(temperatures), confidence=True)


@pytest.mark.parametrize("temperatures", [(1.0, 1.0, 1.0), (2.5, 0.6, 4.0), (0.3, 1.7, 1.0)])
def test_known_temperatures_are_found(temperatures: tuple[float, ...]) -> None:
    wanted = np.array(temperatures)
    table, other = (synthetic(wanted, 20_000, seed) for seed in (1, 2))
    fitted = fit_temperatures(table)
    np.testing.assert_allclose(fitted, wanted, rtol=0.15)
    assert fitted.tolist() == fit_temperatures(table).tolist()
    errors = [error for error in survival_errors(other, fitted) if error is not None]
    assert max(errors) < 0.02
    if temperatures != (1.0, 1.0, 1.0):
        raw = [error for error in survival_errors(other, np.ones(3)) if error is not None]
        assert np.mean(raw) > 3 * np.mean(errors)


def test_the_grid() -> None:
    assert (TEMPERATURES.min(), TEMPERATURES.max(), TEMPERATURES[0]) == (pytest.approx(0.1), pytest.approx(10), 1)
    assert len(set(TEMPERATURES.tolist())) == len(TEMPERATURES) == 201


@given(st.lists(st.tuples(st.integers(0, 3), st.tuples(*[st.floats(-8, 8, width=32)] * 3)), min_size=1, max_size=30))
@settings(max_examples=25)
def test_a_fit_changes_no_order_and_no_position_for_the_worse(drafts: list[tuple[int, tuple[float, ...]]]) -> None:
    rounds = [Round(3, length, False, np.array(logits, np.float32)) for length, logits in drafts]
    table = RoundTable.of(rounds, 3, confidence=True)
    assert table.confidence is not None
    fitted = fit_temperatures(table)
    scaled = confidences(table.confidence.astype(np.float64), fitted)
    for position in range(3):
        order = np.argsort(table.confidence[:, position], kind="stable")
        assert (np.diff(scaled[order, position]) >= 0).all()
        unfitted = np.where(np.arange(3) < position, fitted, 1)  # the earlier ones are fixed
        before, after = (survival_errors(table, each)[position] for each in (unfitted, fitted))
        assert before is not None
        assert after is not None
        assert after <= before


def test_a_position_that_was_never_verified_keeps_its_confidence() -> None:
    logits = np.array([5, 0, 0], np.float32)
    table = RoundTable.of([Round(1, accepted, False, logits) for accepted in (0, 1)] * 50, 3, confidence=True)
    fitted = fit_temperatures(table)
    assert fitted[1:].tolist() == [1, 1]
    assert fitted[0] == pytest.approx(10)  # half of them stand, so as unsure as can be
    assert survival_errors(table, fitted)[1:] == [None, None]
