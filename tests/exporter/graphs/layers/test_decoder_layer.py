"""A whole layer over cached keys and values is the reference's over the whole text."""

import numpy as np
import onnx_ir as ir
import pytest

from dspark.exporter.checkpoints.description import Layer
from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.layers import (
    AttentionBias,
    BlockTokens,
    ForwardPass,
    after,
    decoder_layer,
    distances,
    part_sizes,
    rotation,
)
from dspark.runtime.bundle.contract import MASKED
from tests.exporter.graphs.recorded import FREQUENCIES, Array, assert_computes, make_model, random
from tests.reference import layers as reference
from tests.reference.rope import Rope

PREFIX = "layers.1"
CACHED, NEW = 5, 3
SHAPES = {
    "input_layernorm": (12,),
    "post_attention_layernorm": (12,),
    "self_attn.q_proj": (24, 12),
    "self_attn.k_proj": (12, 12),
    "self_attn.v_proj": (12, 12),
    "self_attn.o_proj": (12, 24),
    "mlp.gate_proj": (20, 12),
    "mlp.up_proj": (20, 12),
    "mlp.down_proj": (12, 20),
}
JOINED = {"self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]}
JOINED |= {"mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"]}


def reference_layer(x: Array, tensors: dict[str, Array], window: int | None) -> tuple[Array, Array, Array]:
    """The layer's output ``[n, H]``, keys and values ``[n, Hkv, D]`` of a whole text."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    positions = np.arange(len(x))
    rope = Rope({"head_dim": 6, "max_position_embeddings": 64})
    rope.inverse = np.array(FREQUENCIES)
    normed = reference.rms_norm(x, tensors[f"{PREFIX}.input_layernorm.weight"], 1e-5)
    query, key, value = (reference.heads(normed, tensors, f"{PREFIX}.self_attn", letter, 6, 1e-5) for letter in "qkv")
    query, key = (rope.rotate(each, positions, positions + 1) for each in (query, key))
    distance = positions[:, None] - positions
    visible = (distance >= 0) & (distance < (window or len(x)))
    mixed = reference.attention(query, key, value, visible)
    x = x + reference.linear(mixed, tensors, f"{PREFIX}.self_attn.o_proj")
    normed = reference.rms_norm(x, tensors[f"{PREFIX}.post_attention_layernorm.weight"], 1e-5)
    return x + reference.mlp(normed, tensors, f"{PREFIX}.mlp"), key, value


@pytest.mark.parametrize("window", [None, 3])
def test_new_tokens_over_cached_ones(window: int | None) -> None:
    tensors = {f"{PREFIX}.{name}.weight": random(*shape, seed=len(name)) for name, shape in SHAPES.items()}
    stored = dict(tensors)
    for name, parts in JOINED.items():
        joined = [stored.pop(f"{PREFIX}.{part}.weight") for part in parts]
        stored[f"{PREFIX}.{name}.weight"] = np.concatenate(joined)
    text = random(CACHED + NEW, 12)
    expected, key, value = reference_layer(text.astype(np.float64), tensors, window)
    key, value = (each.swapaxes(0, 1)[None].astype(np.float32) for each in (key, value))
    bias = np.zeros((1, 1, NEW, CACHED + NEW), np.float32)
    bias[..., CACHED:] = np.triu(np.full((NEW, NEW), MASKED), 1)

    def record(g: GraphBuilder) -> list[ir.Value]:
        model = make_model(g, stored, layers=(Layer(), Layer(window)))
        positions, layout = g.input("positions"), BlockTokens(g.ints(1, -1))
        past = g.input("key"), g.input("value")
        forward = ForwardPass(
            model,
            rotation(g, model.backbone.rope, g.reshape(positions, -1), layout),
            layout,
            AttentionBias(
                model, g.input("bias"), lambda: distances(g, positions, past[0], positions), hides_future=True
            ),
            after([past, past]),
            g.op("Concat", part_sizes(g, past[0]), g.ints(NEW), axis=0),
        )
        x, own = decoder_layer(forward, g.input("x"), 1)
        return [x, *own]

    inputs = {
        "x": text[CACHED:],
        "positions": np.arange(CACHED, CACHED + NEW)[None],
        "key": np.ascontiguousarray(key[:, :, :CACHED]),
        "value": np.ascontiguousarray(value[:, :, :CACHED]),
        "bias": bias,
    }
    assert_computes(record, inputs, expected[CACHED:], key[:, :, CACHED:], value[:, :, CACHED:])
