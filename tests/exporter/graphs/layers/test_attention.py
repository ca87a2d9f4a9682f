"""Attention over keys in several places is the reference's over all of them."""

import numpy as np
import onnx_ir as ir
import pytest

from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.layers.attention import attend
from dspark.runtime.bundle.contract import MASKED
from tests.exporter.graphs.recorded import assert_computes, make_model, random
from tests.reference import layers as reference

BATCH, HEADS, KEY_HEADS, DIM, TOKENS = 2, 4, 2, 6, 3


@pytest.mark.parametrize("counts", [(5,), (5, 3), (4, 3, 1)])
@pytest.mark.parametrize("same_for_all_queries", [False, True])
def test_it_is_the_reference(counts: tuple[int, ...], same_for_all_queries: bool) -> None:
    query = random(BATCH, HEADS, TOKENS, DIM)
    inputs = {"query": query}
    for index, count in enumerate(counts):
        for name in ("key", "value"):
            inputs[f"{name}.{index}"] = random(BATCH, KEY_HEADS, count, DIM, seed=index + 10 * (name == "key"))
    rows = 1 if same_for_all_queries else TOKENS
    visible = np.random.default_rng(3).random((BATCH, rows, sum(counts))) < 0.6
    visible[..., 0] = True
    group = 1 if same_for_all_queries else HEADS // KEY_HEADS
    bias = np.tile(np.where(visible, 0, MASKED).astype(np.float32), (1, group, 1))[:, None]

    def record(g: GraphBuilder) -> list[ir.Value]:
        parts = [(g.input(f"key.{index}"), g.input(f"value.{index}")) for index in range(len(counts))]
        sizes = None if len(counts) == 1 else g.ints(*counts)
        return [attend(make_model(g), g.input("query"), parts, g.input("bias"), sizes)]

    whole = {
        name: np.concatenate([inputs[f"{name}.{index}"] for index in range(len(counts))], axis=2)
        for name in ("key", "value")
    }
    expected = np.array(
        [
            reference.attention(
                *(each[b].swapaxes(0, 1).astype(np.float64) for each in (query, whole["key"], whole["value"])),
                np.broadcast_to(visible[b], (TOKENS, sum(counts))),
            )
            for b in range(BATCH)
        ]
    )
    expected = expected.reshape(BATCH, TOKENS, HEADS, DIM).swapaxes(1, 2)
    assert_computes(record, inputs | {"bias": bias}, expected)
