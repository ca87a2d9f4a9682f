"""Which keys a query sees, for each kind of layer, written out by loops."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dspark.exporter.checkpoints.description import Layer
from dspark.exporter.graphs.layers import AttentionBias, distances
from dspark.runtime.bundle.contract import MASKED
from dspark.runtime.bundle.graph_specs import GraphSpec
from tests.exporter.graphs.recorded import Array, assert_computes, compute, make_model, random, record_nothing

GROUP = 2  # of the default sizes
QUERIES = np.array([[4, 5, 6], [9, 10, 11]])
CACHED = random(2, 2, 8, 6)
KEYS = np.concatenate([np.tile(np.arange(8), (2, 1)), QUERIES], axis=1)  # row s is the token at position s


def test_distances() -> None:
    expected = QUERIES[:, :, None] - KEYS[:, None]
    inputs = {"queries": QUERIES, "cached": CACHED}
    assert_computes(
        lambda g: [distances(g, g.input("queries"), g.input("cached"), g.input("queries"))], inputs, expected
    )


def sees(layer: Layer, query: int, key: int) -> bool:
    near = layer.window is None or abs(query - key) < layer.window
    return near and (key <= query or not layer.causal)


@pytest.mark.parametrize(("window", "causal"), list(product([None, 1, 3], [True, False])))
def test_the_window_and_causality_of_a_layer(window: int | None, causal: bool) -> None:
    """Over a bias that is the same for all queries; it hides the last two cached keys, whatever the layer."""
    layer = Layer(window, causal)
    bias = np.zeros((2, 1, 1, KEYS.shape[1]), np.float32)
    bias[..., 6:8] = MASKED
    inputs = {"bias": bias, "queries": QUERIES, "cached": CACHED}
    rows = GROUP * 3 if window is not None or causal else 1
    (found,) = compute(
        lambda g: [
            g.op(
                "Identity",
                AttentionBias(
                    make_model(g),
                    g.input("bias"),
                    lambda: distances(g, g.input("queries"), g.input("cached"), g.input("queries")),
                    hides_future=False,
                ).of(layer),
            )
        ],
        inputs,
        [(np.float32, (2, 1, rows, KEYS.shape[1]))],
    )
    expected = np.array(
        [[[key not in (6, 7) and sees(layer, query, at) for key, at in enumerate(KEYS[b])] for query in QUERIES[b]]
         for b in range(2)]
    )  # fmt: skip
    stacked: Array = np.tile(expected, (1, GROUP, 1)) if rows > 1 else expected[:, :1]
    assert np.array_equal(found[:, 0] == 0, stacked)
    assert found[:, 0][~stacked].max() <= MASKED


@pytest.mark.parametrize(("heads", "group"), [(4, 2), (2, 1)])
def test_a_causal_bias_is_repeated_for_each_head_of_a_group(heads: int, group: int) -> None:
    bias = random(2, 1, 3, 8)
    assert_computes(
        lambda g: [
            g.op(
                "Identity",
                AttentionBias(make_model(g, head_count=heads), g.input("bias"), pytest.fail, hides_future=True).of(
                    Layer()
                ),
            )
        ],
        {"bias": bias},
        np.concatenate([bias] * group, axis=2),
        tolerance=0,
    )


def test_layers_of_a_kind_share_a_bias(tmp_path: Path) -> None:
    g = record_nothing(GraphSpec("test", (), ()), tmp_path)
    bias = AttentionBias(make_model(g), g.constant(random(2, 1, 3, 8)), lambda: g.ints(0), hides_future=True)
    assert bias.of(Layer()) is bias.of(Layer())
    assert bias.of(Layer(window=4)) is bias.of(Layer(window=4))
    assert bias.of(Layer(window=4)) is not bias.of(Layer())
