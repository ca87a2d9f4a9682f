"""Queries, keys and values are the reference's, however projections are joined."""

import numpy as np
import onnx_ir as ir
import pytest

from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.layers import BlockTokens, heads, rotation
from tests.exporter.graphs.recorded import FREQUENCIES, Array, assert_computes, make_model, random
from tests.reference import layers as reference
from tests.reference.rope import Rope

ATTENTION = "layers.0.self_attn"
COUNTS = {"q": 4, "k": 2, "v": 2}
X, POSITIONS = random(4, 12), np.array([3, 4, 5, 6])


def weights(norms: bool) -> dict[str, Array]:
    found = {
        f"{ATTENTION}.{letter}_proj.weight": random(6 * count, 12, seed=ord(letter)) for letter, count in COUNTS.items()
    }
    return found | (
        {f"{ATTENTION}.{letter}_norm.weight": random(6, seed=ord(letter)) for letter in "qk"} if norms else {}
    )


def expected(letter: str, tensors: dict[str, Array]) -> Array:
    exact = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    split = reference.heads(X.astype(np.float64), exact, ATTENTION, letter, 6, 1e-5)
    rope = Rope({"head_dim": 6, "max_position_embeddings": 64})
    rope.inverse = np.array(FREQUENCIES)
    turned = split if letter == "v" else rope.rotate(split, POSITIONS, POSITIONS + 1)
    return turned[None].swapaxes(1, 2)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("letters", "joined"), [("qkv", ("qkv",)), ("qkv", ("q", "kv")), ("kv", ("kv",))])
def test_they_are_the_reference(letters: str, joined: tuple[str, ...], norms: bool) -> None:
    tensors = weights(norms)
    stored = {name: tensor for name, tensor in tensors.items() if "norm" in name}
    for name in joined:
        parts = [tensors[f"{ATTENTION}.{letter}_proj.weight"] for letter in name]
        stored[f"{ATTENTION}.{name}_proj.weight"] = np.concatenate(parts)

    def record(g: GraphBuilder) -> list[ir.Value]:
        model, layout = make_model(g, stored), BlockTokens(g.ints(1, -1))
        rotary = rotation(g, model.backbone.rope, g.input("positions"), layout)
        return heads(model, g.input("x"), ATTENTION, letters, rotary, layout)

    inputs = {"x": X, "positions": POSITIONS}
    assert_computes(record, inputs, *(expected(letter, tensors) for letter in letters))
