"""The norm is the reference's."""

import numpy as np
import pytest

from dspark.exporter.graphs.layers import rms_norm
from tests.exporter.graphs.recorded import assert_computes, make_model, random
from tests.reference import layers as reference


@pytest.mark.parametrize("shape", [(3, 12), (2, 4, 5, 6)])  # rows, and heads
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_it_is_the_reference(shape: tuple[int, ...], scale: float) -> None:
    x, weight = scale * random(*shape), random(shape[-1], seed=1)
    expected = reference.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-5)
    assert_computes(
        lambda g: [rms_norm(make_model(g, {"norm.weight": weight}), g.input("x"), "norm")], {"x": x}, expected
    )
