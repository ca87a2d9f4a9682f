"""Sequential temperature scaling (STS): one temperature per draft position, fitted from the first to the last.

The calibration of the DSpark paper; what is fitted and how it is shown: docs/guides/evaluation.md.
"""

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.bundle.calibration import confidences
from dspark.runtime.decoding.rounds import RoundTable
from dspark.runtime.evaluation.metrics import expected_calibration_error

__all__ = ["TEMPERATURES", "fit_temperatures", "survival_errors"]

_EXPONENTS = np.linspace(-1, 1, 201)
TEMPERATURES: NDArray[np.float64] = 10.0 ** _EXPONENTS[np.argsort(np.abs(_EXPONENTS), kind="stable")]
"""The grid: 0.1 to 10 in steps of 2.3 %, 1 first, so that of equally good temperatures the mildest is chosen."""


def fit_temperatures(table: RoundTable) -> NDArray[np.float64]:
    """Chooses the temperatures ``[γ]`` that make survival probabilities Π σ(z_i / t_i) honest, from left to right.

    Each position takes the temperature with the least expected calibration error of its survival probability, the
    earlier temperatures being fixed. A position that was never observed keeps 1.

    Args:
        table: Rounds with confidences.
    """
    assert table.confidence is not None
    survival = np.ones(len(table))
    fitted = np.ones(table.draft_length)
    for position in range(table.draft_length):
        logits = table.confidence[:, position].astype(np.float64)
        rows = table.observed[:, position]
        if rows.any():
            before, survived = survival[rows], table.survived[rows, position]
            scaled = [before * confidences(logits[rows], temperature) for temperature in TEMPERATURES]
            errors = np.array([expected_calibration_error(each, survived) for each in scaled], np.float64)
            fitted[position] = TEMPERATURES[np.argmin(errors)]
        survival *= confidences(logits, fitted[position])
    return fitted


def survival_errors(table: RoundTable, temperatures: NDArray[np.float64]) -> list[float | None]:
    """Expected calibration error of the survival probability at each position; None where nothing was observed.

    Args:
        table: Rounds with confidences.
        temperatures: ``[γ]``.
    """
    assert table.confidence is not None
    survival = np.cumprod(confidences(table.confidence.astype(np.float64), temperatures), axis=1)
    return [
        expected_calibration_error(survival[rows, position], table.survived[rows, position])
        for position, rows in enumerate(table.observed.T)
    ]
