"""Linear layers and the embedding."""

import numpy as np
import pytest

from dspark.exporter.graphs.layers import embed, linear
from tests.exporter.graphs.recorded import assert_computes, make_model, random


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer(bias: bool) -> None:
    x, weight, shift = random(3, 12), random(7, 12, seed=1), random(7, seed=2)
    tensors = {"layers.0.o_proj.weight": weight} | ({"layers.0.o_proj.bias": shift} if bias else {})
    expected = x.astype(np.float64) @ weight.T + (shift if bias else 0)
    assert_computes(lambda g: [linear(make_model(g, tensors), g.input("x"), "layers.0.o_proj")], {"x": x}, expected)


def test_the_embedding() -> None:
    table, ids = random(9, 12), np.array([8, 0, 8, 3])
    tensors = {"embed_tokens.weight": table}
    assert_computes(lambda g: [embed(make_model(g, tensors), g.input("ids"))], {"ids": ids}, table[ids], tolerance=0)
