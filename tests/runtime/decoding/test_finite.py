"""Finite logits: a NaN or an infinity anywhere is found, and large finite values are not taken for one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dspark.runtime.decoding.finite import has_finite_sum, require_finite
from dspark.runtime.errors import NumericalError


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32)))
def test_a_row_is_refused_if_and_only_if_a_value_is_not_finite(logits: np.ndarray) -> None:
    wrong = [token for token, value in enumerate(logits.tolist()) if not math.isfinite(value)]
    if not wrong:
        require_finite(logits, "row")
        return
    assert not has_finite_sum(logits)
    with pytest.raises(NumericalError, match=f"^row: the logit of token {wrong[0]} is .*, not a finite number$"):
        require_finite(logits, "row")


def test_a_sum_that_overflows_is_not_finite_but_its_row_is() -> None:
    logits = np.full(4, 3e38, np.float32)
    assert not has_finite_sum(logits)
    require_finite(logits, "row")
