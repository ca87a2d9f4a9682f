"""Flat tokens are regrouped per request, and come back in their order."""

import numpy as np
import onnx_ir as ir

from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.layers import BlockTokens, RaggedTokens
from tests.exporter.graphs.recorded import assert_computes, random

HEADS, DIM = 2, 3


def test_ragged_requests() -> None:
    """Of three requests with 3, 1 and 2 tokens."""
    x = random(6, HEADS, DIM)
    pad, unpad = np.array([[0, 1, 2], [3, 3, 3], [4, 5, 5]]), np.array([0, 1, 2, 3, 6, 7])

    def record(g: GraphBuilder) -> list[ir.Value]:
        layout = RaggedTokens(g.input("pad"), g.input("unpad"))
        grouped = layout.group(g, g.input("x"), HEADS, DIM)
        return [grouped, layout.flatten(g, grouped, HEADS * DIM)]

    inputs = {"x": x, "pad": pad, "unpad": unpad}
    assert_computes(record, inputs, x[pad].swapaxes(1, 2), x.reshape(6, -1), tolerance=0)


def test_requests_of_the_same_length() -> None:
    x = random(6, HEADS, DIM)

    def record(g: GraphBuilder) -> list[ir.Value]:
        layout = BlockTokens(g.ints(-1, 3))
        grouped = layout.group(g, g.input("x"), HEADS, DIM)
        return [grouped, layout.flatten(g, grouped, HEADS * DIM)]

    expected = x.reshape(2, 3, HEADS, DIM).swapaxes(1, 2)
    assert_computes(record, {"x": x}, expected, x.reshape(6, -1), tolerance=0)
