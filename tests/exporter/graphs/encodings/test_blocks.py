"""Integers in blocks: the product is that of the rounded weights, in widths that blocks do not divide, too."""

import numpy as np
import onnx_ir as ir
import pytest

from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.encodings import Blocks
from tests.exporter.graphs.recorded import Array, ArrayTensor, assert_computes, random

FLOAT32 = 1
"""The accuracy level that rounds no inputs."""


def rounded(weight: Array, bits: int, size: int) -> Array:
    """Each block in steps of its farthest value, which is the lowest whole number."""
    result = weight.astype(np.float64)
    low = 1 << (bits - 1)
    for row in result:
        for start in range(0, len(row), size):
            block = row[start : start + size]
            step = block[np.abs(block).argmax()] / -low
            block[:] = np.clip(np.rint(block / step), -low, low - 1) * step
    return result


@pytest.mark.parametrize("width", [32, 64, 80])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (8, 32), (8, 64)])
def test_a_product(bits: int, size: int, width: int) -> None:
    x, weight = random(3, width), random(7, width)
    tensor = ArrayTensor("weight", weight)
    expected = x.astype(np.float64) @ rounded(weight, bits, size).T
    assert_computes(
        lambda g: [Blocks(bits, size, FLOAT32).multiply(g, g.input("x"), "weight", tensor)],
        {"x": x},
        expected,
        tolerance=1e-4,
    )


@pytest.mark.parametrize("width", [64, 80])
def test_rows_of_a_table(width: int) -> None:
    table, ids = random(7, width), np.array([6, 0, 6])
    tensor = ArrayTensor("weight", table)
    assert_computes(
        lambda g: [Blocks(8, 32, FLOAT32).look_up(g, g.input("ids"), "weight", tensor)],
        {"ids": ids},
        rounded(table, 8, 32)[ids],
    )


def test_there_are_no_tables_of_four_bits() -> None:
    def record(g: GraphBuilder) -> list[ir.Value]:
        return [
            Blocks(4, 32, FLOAT32).look_up(g, g.input("ids"), "embed_tokens.weight", ArrayTensor("", random(7, 64)))
        ]

    with pytest.raises(AssertionError, match=r"embed_tokens\.weight: tables have no encoding of four bits"):
        assert_computes(record, {"ids": np.array([0])}, random(1, 64))
