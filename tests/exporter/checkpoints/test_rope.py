"""RoPE against formulas in float64 and, where it is installed, against transformers."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.exporter.checkpoints.description import DynamicScaling
from dspark.exporter.checkpoints.rope import context_length, resolve_rope
from dspark.exporter.errors import CheckpointError

BASE = {"max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn untruncated": YARN | {"truncate": False},
    "yarn betas": YARN | {"beta_fast": 16, "beta_slow": 2.0},
    "yarn attention": YARN | {"attention_factor": 1.25},
    "yarn mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn small": YARN | {"factor": 0.5},
}


def plain(theta: float, dim: int) -> np.ndarray:
    return theta ** -(np.arange(0, dim, 2) / dim)


def llama3(theta: float, dim: int) -> np.ndarray:
    inverse = plain(theta, dim)
    turns = LLAMA3["original_max_position_embeddings"] * inverse / (2 * math.pi)
    share = np.clip(
        (turns - LLAMA3["low_freq_factor"]) / (LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"]), 0, 1
    )
    return inverse * (share + (1 - share) / LLAMA3["factor"])


def yarn(theta: float, dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """Pairs that turn more than beta_fast times are kept, less than beta_slow times divided, linear between."""
    ends = [
        dim * math.log(scaling["original_max_position_embeddings"] / (beta * 2 * math.pi)) / (2 * math.log(theta))
        for beta in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
    ]
    if scaling.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    divided = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return plain(theta, dim) * (1 - divided + divided / scaling["factor"])


def expected(name: str, theta: float, dim: int) -> np.ndarray:
    match name:
        case "default" | "dynamic":
            return plain(theta, dim)
        case "linear":
            return plain(theta, dim) / 2.5
        case "llama3":
            return llama3(theta, dim)
        case _:
            return yarn(theta, dim, SCALINGS[name])


@pytest.mark.parametrize("theta", [10000.0, 1_000_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_the_formulas(name: str, theta: float) -> None:
    rope = resolve_rope(BASE | {"rope_theta": theta, "rope_scaling": SCALINGS[name]}, 64)
    np.testing.assert_allclose(rope.inverse_frequencies, expected(name, theta, 64), rtol=3e-6)
    assert np.array_equal(np.float32(rope.inverse_frequencies), rope.inverse_frequencies), "not float32"
    assert rope.rotary_dim == 64


@pytest.mark.parametrize(
    ("name", "magnitude"),
    [
        ("default", 1.0),
        ("linear", 1.0),
        ("llama3", 1.0),
        ("yarn", 0.1 * math.log(4) + 1),
        ("yarn attention", 1.25),
        ("yarn mscale", (0.1 * math.log(4) + 1) / (0.08 * math.log(4) + 1)),
        ("yarn small", 1.0),
    ],
)
def test_magnitude(name: str, magnitude: float) -> None:
    assert resolve_rope(BASE | {"rope_scaling": SCALINGS[name]}, 64).magnitude == pytest.approx(magnitude, rel=1e-12)


def test_dynamic_keeps_what_the_graph_needs() -> None:
    rope = resolve_rope(BASE | {"rope_theta": 5000.0, "rope_scaling": {"type": "dynamic", "factor": 2}}, 64)
    assert rope.dynamic == DynamicScaling(theta=5000.0, factor=2.0, original_length=4096)


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1234.5])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str, theta: float) -> None:
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    parameters = SCALINGS[name] | {"rope_theta": theta}
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=dict(parameters)
    )
    kind = parameters["rope_type"]
    functions = rope_utils.ROPE_INIT_FUNCTIONS
    compute = functions.get(kind, llama.LlamaRotaryEmbedding.compute_default_rope_parameters)
    frequencies, magnitude = compute(config, device="cpu")
    rope = resolve_rope(BASE | {"rope_parameters": parameters}, 128)
    ours = np.array(rope.inverse_frequencies, np.float32)
    # One rounding of the power, which llama3 can make a few where it takes a difference.
    np.testing.assert_allclose(ours, frequencies.numpy(), rtol=5e-7)
    assert (ours == frequencies.numpy()).mean() > 0.9
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-12)


@given(
    theta=st.floats(100, 1e7),
    factor=st.floats(1, 64),
    name=st.sampled_from(["linear", "dynamic", "llama3", "yarn"]),
    partial=st.sampled_from([0.25, 0.5, 1.0]),
)
@settings(max_examples=50)
def test_spellings_mean_the_same(theta: float, factor: float, name: str, partial: float) -> None:
    scaling = SCALINGS[name] | {"factor": factor}
    old_kind = {key: value for key, value in scaling.items() if key != "rope_type"} | {"type": scaling["rope_type"]}
    spellings = [
        BASE | {"rope_theta": theta, "partial_rotary_factor": partial, "rope_scaling": old_kind},
        BASE | {"rope_theta": theta, "partial_rotary_factor": partial, "rope_scaling": scaling},
        BASE | {"rope_parameters": scaling | {"rope_theta": theta, "partial_rotary_factor": partial}},
        BASE
        | {"rope_theta": theta, "partial_rotary_factor": partial, "rope_parameters": scaling, "rope_scaling": None},
    ]
    resolved = [resolve_rope(spelling, 64) for spelling in spellings]
    assert resolved.count(resolved[0]) == len(spellings)
    assert resolved[0].rotary_dim == 64 * partial
    assert len({context_length(spelling) for spelling in spellings}) == 1


@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_partial_rotary_factor_rotates_the_first_dimensions(place: str) -> None:
    config = {
        "top": {"partial_rotary_factor": 0.5},
        "rope_parameters": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    }
    rope = resolve_rope(BASE | config[place], 32)
    np.testing.assert_allclose(rope.inverse_frequencies, plain(10000.0, 16), rtol=1e-6)


def test_original_length_at_top_level() -> None:
    nested = resolve_rope(BASE | {"rope_scaling": YARN}, 64)
    scaling = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    assert resolve_rope(BASE | {"rope_scaling": scaling, "original_max_position_embeddings": 1024}, 64) == nested
    assert resolve_rope(BASE | {"rope_scaling": scaling}, 64) != nested


def test_yarn_infers_its_factor() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert resolve_rope(BASE | {"rope_scaling": scaling}, 64) == resolve_rope(BASE | {"rope_scaling": YARN}, 64)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 2.5}, 10240),
        ({"type": "dynamic", "factor": 4}, 16384),
        (LLAMA3, 4096),
        (YARN | {"factor": 8.0}, 8192),
    ],
)
def test_context_length_includes_scaling(scaling: dict[str, Any] | None, length: int) -> None:
    assert context_length(BASE | {"rope_scaling": scaling}) == length


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "'longrope' is not supported.*default, linear, dynamic",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "not supported"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "rope_scaling.type.*contradicts"),
        (
            {"rope_theta": 10000, "rope_parameters": {"rope_theta": 5e5}},
            r"rope_theta = 10000 contradicts rope_parameters",
        ),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"factor": 4.0}}, "rope_scaling.factor = 8.0 contradicts"),
        ({"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "linear lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor = nan"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "facter": 2}}, "facter = 2 is not known"),
        ({"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}, "mrope_section"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor must be greater"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention is for some layers only"),
        ({"partial_rotary_factor": 0.3}, "rotates 19 of 64 dimensions"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ({"rope_theta": -1.0}, "rope_theta = -1.0"),
        ({"max_position_embeddings": None}, "lacks max_position_embeddings"),
    ],
)
def test_refusals(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_rope(BASE | config, 64, "model/config.json")
