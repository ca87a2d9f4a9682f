"""Targets of every family and rotary type, and what drafter backbones may have, against the reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.runtime import DSparkInference, RequestError, SamplingParams
from tests.checkpoints import OMIT, write_deepspec, write_eagle3, write_speculators, write_target, write_zlab_dflash
from tests.reference import ReferenceDrafter, ReferenceTarget, greedy
from tests.support.exported import Pair, assert_same_decoding, export

TEXT = np.random.default_rng(5).integers(0, 90, 700).tolist()
PROMPTS = [TEXT[:3], TEXT[10:32], TEXT[40:81]]

THETA: dict[str, Any] = {"rope_theta": 3e4}
LINEAR: dict[str, Any] = {"factor": 3.0}
DYNAMIC: dict[str, Any] = {"factor": 3.0}
LLAMA3: dict[str, Any] = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = {"linear": LINEAR, "dynamic": DYNAMIC, "llama3": LLAMA3, "yarn": YARN}


def rope(kind: str, spelling: str, **values: Any) -> dict[str, Any]:
    """Keys of a configuration in the words of transformers 5, 4, or before (``type``)."""
    if spelling == "v5":
        return {"rope_parameters": {"rope_type": kind, **THETA, **values}}
    return {**THETA, "rope_scaling": {"rope_type" if spelling == "v4" else "type": kind, **values}}


SHORT = {"max_position_embeddings": 40}  # dynamic NTK stretches what is longer
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-all-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-one-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 12, "num_key_value_heads": 2}),
    "llama-narrow-heads": ("llama", {"head_dim": 4, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "llama-no-head-dim": ("llama", {"head_dim": OMIT}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-theta-v4": ("llama", {"rope_theta": 500.0}),
    "mistral": ("mistral", {"num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-long-window": ("mistral", {"sliding_window": 4096}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    "qwen3-tied-narrow": ("qwen3", {"head_dim": 6, "tie_word_embeddings": True}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 1, **SLIDING}),
    "qwen3-window-of-text": ("qwen3", {"use_sliding_window": True, "sliding_window": 41, **SLIDING}),
    **{
        f"{family}-{kind}-{spelling}": (family, rope(kind, spelling, **values) | (SHORT if kind == "dynamic" else {}))
        for (kind, values), family in zip(SCALINGS.items(), ("mistral", "llama", "llama", "qwen3"), strict=True)
        for spelling in ("v5", "v4", "old")
    },
    "llama-llama3-window": ("mistral", rope("llama3", "v5", **LLAMA3) | {"sliding_window": 11}),
    "llama-yarn-attention-factor": ("llama", rope("yarn", "v5", **YARN, attention_factor=1.3, truncate=False)),
    "llama-yarn-mscale": ("llama", rope("yarn", "v5", **YARN, mscale=1.2, mscale_all_dim=0.7, beta_fast=16)),
    "qwen2-yarn-no-original": ("qwen2", rope("yarn", "old", factor=4.0)),
    "llama-yarn-no-factor": ("llama", rope("yarn", "v5", original_max_position_embeddings=64)),
    "llama-yarn-original-outside": (
        "llama",
        rope("yarn", "v5", factor=4.0) | {"original_max_position_embeddings": 32},
    ),
    "qwen2-dynamic-window": (
        "qwen2",
        rope("dynamic", "v5", **DYNAMIC)
        | SHORT
        | {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets(case: str, tmp_path: Path) -> None:
    family, changes = TARGETS[case]
    target = write_target(tmp_path / "target", family, **changes)
    pair = Pair.make(target, write_deepspec(tmp_path / "drafter", target, head="vanilla"), tmp_path / "bundle")
    decoded = assert_same_decoding(pair, PROMPTS[1:], 16)
    assert sum(sum(each.accepted_draft_lengths) for each in decoded) > 0


@pytest.mark.parametrize("changes", [rope("default", "v5"), rope("linear", "v5", factor=2.0)])
def test_a_changed_rotation_changes_the_output(changes: dict[str, Any], tmp_path: Path) -> None:
    """What the cases above would not notice, they would not test."""
    written = [write_target(tmp_path / str(index), "llama", **each) for index, each in enumerate([{}, changes])]
    outputs = [greedy(ReferenceTarget(target), PROMPTS[2], 24) for target in written]
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dynamic_ntk_is_stretched_while_decoding(family: str, tmp_path: Path) -> None:
    changes = rope("dynamic", "v5", **DYNAMIC) | SHORT
    target = write_target(tmp_path / "target", family, **changes)
    pair = Pair.make(target, write_deepspec(tmp_path / "drafter", target), tmp_path / "bundle")
    prompts = [TEXT[:30], TEXT[:45]]  # one shorter and one longer than the 40 tokens of the original context
    assert_same_decoding(pair, prompts, 40)


LONG: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"use_sliding_window": True, "sliding_window": 300, **SLIDING},
    "short-window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "dynamic": rope("dynamic", "v5", factor=8.0) | {"max_position_embeddings": 100},
}


@pytest.mark.parametrize("case", LONG)
def test_prompts_of_several_prefill_chunks(case: str, tmp_path: Path) -> None:
    changes = {"max_position_embeddings": 1024, "num_hidden_layers": 4} | LONG[case]
    target = write_target(tmp_path / "target", "qwen3", **changes)
    window = {"use_sliding_window": True, "sliding_window": 270, "layer_types": ["sliding_attention", "full_attention"]}
    drafter = write_deepspec(tmp_path / "drafter", target, **window)
    pair = Pair.make(target, drafter, tmp_path / "bundle")
    prompts = [TEXT[:600], TEXT[50:320], TEXT[9:30]]
    assert_same_decoding(pair, prompts, 8)


@pytest.mark.parametrize("window", [None, 260])
def test_prompts_longer_than_an_eagle3_extension(window: int | None, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "llama", max_position_embeddings=1024)
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": window} if window else {}
    drafter = write_eagle3(tmp_path / "drafter", target, layout="legacy", taps=[0, 1, 2], **sliding)
    pair = Pair.make(target, drafter, tmp_path / "bundle", steps=5)
    assert_same_decoding(pair, [TEXT[:3], TEXT[:530], TEXT[:257], TEXT[100:356]], 4)


# Drafter backbones

WINDOWS = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
BACKBONES: dict[str, dict[str, Any]] = {
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    "theta-v4": {"rope_parameters": OMIT, "rope_theta": 700.0},
    "partial": {"partial_rotary_factor": 0.5},
    "partial-inside": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "linear": rope("linear", "v5", **LINEAR),
    "linear-old": rope("linear", "old", **LINEAR) | {"rope_parameters": OMIT},
    "llama3": rope("llama3", "v5", **LLAMA3),
    "llama3-v4": rope("llama3", "v4", **LLAMA3) | {"rope_parameters": OMIT},
    "yarn": rope("yarn", "v5", **YARN),
    "yarn-partial": rope("yarn", "v5", **YARN, partial_rotary_factor=0.5),
    "yarn-old": rope("yarn", "old", **YARN) | {"rope_parameters": OMIT},
    "biases": {"attention_bias": True},
    "one-head": {"num_key_value_heads": 1},
    "all-heads": {"num_key_value_heads": 4, "head_dim": 6},
    "heads-unlike-the-target": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    "epsilon": {"rms_norm_eps": 0.3},
    "short-context": {"max_position_embeddings": 16},
    "window": WINDOWS | {"sliding_window": 6},
    "window-of-one": WINDOWS | {"sliding_window": 1},
    "window-in-the-block": WINDOWS | {"sliding_window": 3},
    "window-of-text": WINDOWS | {"sliding_window": 41},
    "long-window": WINDOWS | {"sliding_window": 4096},
    "window-from-layer-1": {
        "layer_types": OMIT,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "window-by-layer-types": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target", "qwen3")


@pytest.mark.parametrize("case", BACKBONES)
def test_drafter_backbones(case: str, target: Path, tmp_path: Path) -> None:
    drafter = write_deepspec(tmp_path / "drafter", target, head="gated", **BACKBONES[case])
    pair = Pair.make(target, drafter, tmp_path / "bundle")
    assert_same_decoding(pair, PROMPTS[1:])


NESTED = ["theta", "partial-inside", "llama3", "biases", "window", "short-context"]


@pytest.mark.parametrize("case", NESTED)
def test_backbones_nested_in_speculators_files(case: str, target: Path, tmp_path: Path) -> None:
    drafter = write_speculators(tmp_path / "drafter", target, draft_vocab=60, backbone_changes=BACKBONES[case])
    pair = Pair.make(target, drafter, tmp_path / "bundle")
    assert_same_decoding(pair, PROMPTS[1:])


@pytest.mark.parametrize("case", ["theta", "partial", "llama3-v4", "yarn", "short-context"])
def test_backbones_of_eagle3_drafters(case: str, target: Path, tmp_path: Path) -> None:
    drafter = write_eagle3(tmp_path / "drafter", target, layout="legacy", taps=[0, 1, 2], **BACKBONES[case])
    pair = Pair.make(target, drafter, tmp_path / "bundle", steps=5)
    assert_same_decoding(pair, PROMPTS[1:])


def test_what_backbones_change_can_be_seen(target: Path, tmp_path: Path) -> None:
    """A case above that changed nothing would test nothing."""
    reference = ReferenceTarget(target)
    states = reference.forward(PROMPTS[2])[1]
    names = {name.removesuffix("-v4").removesuffix("-old").removesuffix("-inside") for name in BACKBONES}
    names -= {"long-window", "short-context", "window-by-layer-types"}  # as the plain one or another case
    hidden = []
    for case in ["plain", *sorted(names)]:
        folder = write_deepspec(tmp_path / case, target, head="gated", **BACKBONES.get(case, {}))
        drafter = ReferenceDrafter(folder, reference)
        hidden.append(drafter.draft(drafter.taps(states)[:-1], PROMPTS[2]).hidden)
    for index, one in enumerate(hidden):
        assert not any(np.allclose(one, other, rtol=1e-3) for other in hidden[:index])


# Files


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 3), ("float16", 1), ("bfloat16", 2)])
def test_types_and_shards(dtype: str, shards: int, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "qwen2", dtype=dtype, shards=shards)
    drafter = write_deepspec(tmp_path / "drafter", target, dtype=dtype, shards=shards)
    pair = Pair.make(target, drafter, tmp_path / "bundle")
    assert_same_decoding(pair, PROMPTS[1:])


# Ends


def stops(target: Path) -> tuple[list[int], list[int]]:
    """A prompt's output and its distinct tokens in order of appearance."""
    output = greedy(ReferenceTarget(target), PROMPTS[1], 24)
    return output, list(dict.fromkeys(output))


def test_stop_tokens_of_both_configurations(target: Path, tmp_path: Path) -> None:
    output, distinct = stops(target)
    first, second = distinct[3], distinct[6]
    for name, config, generation in (("config", first, [second]), ("generation", second, [94, first])):
        folder = write_target(
            tmp_path / name, "qwen3", eos_token_id=config, generation_config={"eos_token_id": generation}
        )
        drafter = write_deepspec(tmp_path / f"{name}.drafter", folder, head="vanilla")
        pair = Pair.make(folder, drafter, tmp_path / f"{name}.bundle")
        stop = [config, *generation]
        assert_same_decoding(pair, PROMPTS, 24, stop=stop)
        completion = pair.generate([PROMPTS[1]], 24)[0]
        assert completion.token_ids == output[: output.index(first) + 1]
        assert completion.finish_reason == "stop"


def test_a_stop_token_in_every_slot(target: Path, tmp_path: Path) -> None:
    drafter = write_deepspec(tmp_path / "drafter", target, head="vanilla")
    output, distinct = stops(target)
    for index, stop in enumerate(distinct[:6]):
        folder = write_target(tmp_path / f"t{index}", "qwen3", eos_token_id=[stop, 94])
        pair = Pair.make(folder, drafter, tmp_path / f"b{index}")
        assert_same_decoding(pair, [PROMPTS[1]], 24, stop=[stop])
        assert pair.generate([PROMPTS[1]], 24)[0].token_ids == output[: output.index(stop) + 1]


def test_the_target_bounds_the_text(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", max_position_embeddings=40)
    model = DSparkInference.load(export(target, None, tmp_path / "bundle"), threads=1)
    completion = model.generate([TEXT[:30]], SamplingParams(max_new_tokens=10))[0]
    assert completion.token_ids == greedy(ReferenceTarget(target), TEXT[:30], 10)
    with pytest.raises(RequestError, match=r"30 tokens and max_new_tokens 11 make 41; the limit is 40"):
        model.generate([TEXT[:30]], SamplingParams(max_new_tokens=11))


def test_scaling_lengthens_the_context(tmp_path: Path) -> None:
    lengths = {}
    for kind in ("linear", "dynamic", "yarn", "llama3"):
        changes = rope(kind, "v5", **SCALINGS[kind]) | {"max_position_embeddings": 64}
        bundle = export(write_target(tmp_path / kind, **changes), None, tmp_path / f"{kind}.bundle")
        lengths[kind] = DSparkInference.load(bundle, threads=1).context_length
    assert lengths == {"linear": 192, "dynamic": 192, "yarn": 128, "llama3": 64}


def test_a_text_beyond_the_drafters_context(target: Path, tmp_path: Path) -> None:
    for name, write in (("zlab", write_zlab_dflash), ("deepspec", write_deepspec)):
        drafter = write(tmp_path / name, target, max_position_embeddings=16)
        pair = Pair.make(target, drafter, tmp_path / f"{name}.bundle")
        assert_same_decoding(pair, [TEXT[:10], TEXT[:100]], 40)
