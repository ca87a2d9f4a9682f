"""The feed-forward half is the reference's."""

import numpy as np

from dspark.exporter.graphs.layers import feed_forward
from tests.exporter.graphs.recorded import assert_computes, make_model, random
from tests.reference import layers as reference


def test_it_is_the_reference() -> None:
    x, norm = random(3, 12), random(12, seed=1)
    parts = {f"mlp.{name}_proj.weight": random(20, 12, seed=index) for index, name in enumerate(["gate", "up"])}
    down = random(12, 20)
    stored = {
        "layers.3.post_attention_layernorm.weight": norm,
        "layers.3.mlp.gate_up_proj.weight": np.concatenate(list(parts.values())),
        "layers.3.mlp.down_proj.weight": down,
    }
    exact = {name: each.astype(np.float64) for name, each in (parts | {"mlp.down_proj.weight": down}).items()}
    normed = reference.rms_norm(x.astype(np.float64), norm.astype(np.float64), 1e-5)
    expected = x + reference.mlp(normed, exact, "mlp")
    assert_computes(lambda g: [feed_forward(make_model(g, stored), g.input("x"), 3)], {"x": x}, expected)
