"""Rotations are the reference's, whatever the scaling."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from dspark.exporter.checkpoints.description import DynamicScaling, Rope
from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.layers import BlockTokens, rotation
from tests.exporter.graphs.recorded import Array, assert_computes, random
from tests.reference.rope import Rope as ReferenceRope

HEADS, HEAD_DIM = 3, 8
POSITIONS = np.array([0, 1, 7, 30, 63, 64, 65, 200])  # two requests of four tokens


def config(**scaling: Any) -> dict[str, Any]:
    values = {"rope_type": "default", "rope_theta": 1e3} | scaling
    return {"head_dim": HEAD_DIM, "max_position_embeddings": 64, "rope_parameters": values}


def check(rope: Rope, reference: ReferenceRope, seen: Array, lengths: Array | None = None) -> None:
    x = random(len(POSITIONS), HEADS, HEAD_DIM)

    def record(g: GraphBuilder) -> list[ir.Value]:
        layout = BlockTokens(g.ints(2, -1))
        given = None if lengths is None else g.input("lengths")
        tables = rotation(g, rope, g.input("positions"), layout, given)
        return [tables.apply(g, layout.group(g, g.input("x"), HEADS, HEAD_DIM), HEAD_DIM)]

    turned = reference.rotate(x.astype(np.float64), POSITIONS, seen)
    inputs = {"x": x, "positions": POSITIONS} | ({} if lengths is None else {"lengths": lengths})
    assert_computes(record, inputs, turned.reshape(2, 4, HEADS, HEAD_DIM).swapaxes(1, 2), tolerance=3e-5)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_plain_rotations_of_whole_and_partial_heads(partial: float) -> None:
    reference = ReferenceRope(config(), partial)
    check(Rope(tuple(reference.inverse)), reference, POSITIONS + 1)


def test_the_magnitude_scales_what_is_rotated() -> None:
    reference = ReferenceRope(config(rope_type="yarn", factor=4.0))
    assert reference.magnitude != 1
    check(Rope(tuple(reference.inverse), reference.magnitude), reference, POSITIONS + 1)


@pytest.mark.parametrize("lengths", [None, np.maximum(POSITIONS + 1, 100)])
def test_dynamic_scaling_sees_the_position_or_the_length_that_is_given(lengths: Array | None) -> None:
    reference = ReferenceRope(config(rope_type="dynamic", factor=2.0))
    rope = Rope(tuple(reference.inverse), dynamic=DynamicScaling(1e3, 2.0, 64))
    check(rope, reference, POSITIONS + 1 if lengths is None else lengths, lengths)
