"""Whether logits are finite numbers."""

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dspark.runtime.errors import NumericalError

__all__ = ["has_finite_sum", "require_finite"]

Logits: TypeAlias = npt.NDArray[np.float32]


def has_finite_sum(logits: Logits) -> bool:
    """Whether a row's sum is finite: only finite values can have a finite sum, and large ones may overflow it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(logits.sum())


def require_finite(logits: Logits, name: str) -> None:
    """Makes sure that all values of a row are finite.

    Args:
        logits: ``[V]``.
        name: What the row is, for the error.

    Raises:
        NumericalError: The row holds a NaN or an infinity; names its token id.
    """
    if has_finite_sum(logits):  # one pass without a temporary
        return
    finite = np.isfinite(logits)
    if not finite.all():
        token = int(finite.argmin())
        raise NumericalError(f"{name}: the logit of token {token} is {logits[token]}, not a finite number")
