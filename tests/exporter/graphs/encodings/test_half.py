"""float16 and bfloat16: what is rounded, what is not, and what would overflow."""

import ml_dtypes
import numpy as np
import pytest

from dspark.exporter.graphs.encodings import BFloat16, Encoding, Float16
from tests.exporter.graphs.recorded import Array, ArrayTensor, assert_computes, random

X, WEIGHT, IDS = random(3, 12), random(7, 12), np.array([6, 0, 6])
TENSOR = ArrayTensor("weight", WEIGHT)
TYPES = [(Float16(), np.float16), (BFloat16(), ml_dtypes.bfloat16)]


def rounded(values: Array, dtype: type) -> Array:
    return values.astype(dtype).astype(np.float64)


def test_a_product_of_rounded_values() -> None:
    expected = rounded(X, np.float16) @ rounded(WEIGHT, np.float16).T
    assert_computes(
        lambda g: [Float16().multiply(g, g.input("x"), "layers.0.o_proj.weight", TENSOR)],
        {"x": X},
        expected,
        tolerance=1e-3,  # the sum is rounded, too
    )


@pytest.mark.parametrize(("encoding", "dtype"), TYPES)
@pytest.mark.parametrize("name", ["lm_head.weight", "markov_head.markov_w2.weight"])
def test_logits_come_from_inputs_that_are_not_rounded(encoding: Encoding, dtype: type, name: str) -> None:
    expected = X.astype(np.float64) @ rounded(WEIGHT, dtype).T
    assert_computes(lambda g: [encoding.multiply(g, g.input("x"), name, TENSOR)], {"x": X}, expected, tolerance=1e-6)


@pytest.mark.parametrize(("encoding", "dtype"), TYPES)
def test_rows_of_a_table_are_rounded_once(encoding: Encoding, dtype: type) -> None:
    expected = rounded(WEIGHT, dtype)[IDS]
    assert_computes(
        lambda g: [encoding.look_up(g, g.input("ids"), "weight", TENSOR)], {"ids": IDS}, expected, tolerance=0
    )


@pytest.mark.parametrize("name", ["drafter.fc.weight", "fc.weight", "layers.0.mlp.down_proj.weight"])
def test_wide_layers_take_and_give_what_float16_cannot_hold(name: str) -> None:
    x = (1e5 * X).astype(np.float32)
    expected = x.astype(np.float64) @ rounded(WEIGHT, np.float16).T
    assert np.abs(x).max() > 65504 < np.abs(expected).max()
    assert_computes(lambda g: [Float16().multiply(g, g.input("x"), name, TENSOR)], {"x": x}, expected, tolerance=2e-3)
