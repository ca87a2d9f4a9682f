"""Eight-bit integers, with rounded activations and for the weights alone."""

import numpy as np
import onnx_ir as ir
import pytest

from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.encodings import Encoding, Int8, Int8Weights
from tests.exporter.graphs.recorded import Array, ArrayTensor, assert_computes, compute, random

IN, OUT = 48, 10  # blocks of 16 channels are rotated
X, WEIGHT, IDS = random(5, IN), random(OUT, IN), np.array([9, 0, 9, 4])
TENSOR = ArrayTensor("weight", WEIGHT)
EXACT = X.astype(np.float64) @ WEIGHT.T.astype(np.float64)


def product(encoding: Encoding, x: Array) -> Array:
    def record(g: GraphBuilder) -> list[ir.Value]:
        return [encoding.multiply(g, g.input("x"), "weight", TENSOR)]

    (found,) = compute(record, {"x": x}, [(np.float32, (len(x), OUT))])
    return found


def test_weights_alone_are_rounded_to_a_127th_of_their_row() -> None:
    scales = np.abs(WEIGHT).max(axis=1, keepdims=True).astype(np.float64) / 127
    expected = X.astype(np.float64) @ (np.rint(WEIGHT / scales) * scales).T
    assert_computes(lambda g: [Int8Weights().multiply(g, g.input("x"), "weight", TENSOR)], {"x": X}, expected)


def test_rounded_products_are_near_the_exact_ones() -> None:
    found = product(Int8(), X)
    error = np.sqrt(np.mean((found - EXACT) ** 2) / np.mean(EXACT**2))
    assert 0 < error < 0.06  # 0.009 by rounding; sums of pairs saturate on processors with AVX2 but without VNNI


def test_the_rotation_spreads_an_outlier() -> None:
    """Without it a channel that is a thousand times larger would leave no steps for the others of its row."""
    outlier = X.copy()
    outlier[:, 3] *= 1000
    tensor = ArrayTensor("weight", WEIGHT * (np.arange(IN) != 3))  # what is left of the product are the others
    (found,) = compute(
        lambda g: [Int8().multiply(g, g.input("x"), "weight", tensor)], {"x": outlier}, [(np.float32, (5, OUT))]
    )
    step = np.abs(outlier).max(axis=1) / 127
    plain = np.rint(outlier / step[:, None]) * step[:, None]
    expected = outlier.astype(np.float64) @ tensor.load().T
    assert np.abs(found - expected).mean() < np.abs(plain @ tensor.load().T - expected).mean()


def test_a_row_of_zeros_gives_zeros_and_leaves_the_others_alone() -> None:
    x = X.copy()
    x[2] = 0
    found = product(Int8(), x)
    assert np.array_equal(found[2], np.zeros(OUT))
    assert np.array_equal(np.delete(found, 2, 0), np.delete(product(Int8(), X), 2, 0))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_row_does_not_depend_on_those_beside_it(count: int) -> None:
    large = np.concatenate([X[:count], 100 * X])
    assert np.array_equal(product(Int8(), large)[:count], product(Int8(), X)[:count])


@pytest.mark.parametrize("encoding", [Int8(), Int8Weights()])
def test_rows_of_a_table(encoding: Encoding) -> None:
    assert_computes(
        lambda g: [encoding.look_up(g, g.input("ids"), "weight", TENSOR)],
        {"ids": IDS},
        WEIGHT[IDS],
        tolerance=0.01,
    )
