"""float32 rounds nothing."""

import numpy as np

from dspark.exporter.graphs.encodings import Float32
from tests.exporter.graphs.recorded import ArrayTensor, assert_computes, random

X, WEIGHT, IDS = random(3, 12), random(7, 12), np.array([[6, 0], [6, 3]])
TENSOR = ArrayTensor("weight", WEIGHT)


def test_a_product() -> None:
    expected = X.astype(np.float64) @ WEIGHT.T.astype(np.float64)
    assert_computes(lambda g: [Float32().multiply(g, g.input("x"), "weight", TENSOR)], {"x": X}, expected)


def test_rows_of_a_table_for_ids_of_any_shape() -> None:
    assert_computes(
        lambda g: [Float32().look_up(g, g.input("ids"), "weight", TENSOR)], {"ids": IDS}, WEIGHT[IDS], tolerance=0
    )
