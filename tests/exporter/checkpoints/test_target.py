"""Targets in Hugging Face folders: read right, and refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from dspark.exporter.checkpoints import read_target
from dspark.exporter.checkpoints.description import Layer, Target, TextAssets
from dspark.exporter.checkpoints.target import target_from_config
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.errors import CheckpointError
from tests.exporter.checkpoints.editing import GOLDEN, Checkpoint

Copy = Callable[[str], Checkpoint]
Edit = Callable[[Checkpoint], Any]

QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")


@pytest.mark.parametrize("name", ["qwen3_target", "llama_target"])
def test_golden_targets(golden: Path, name: str) -> None:
    target = read_target(golden / name)
    stored = load_file(golden / name / "model.safetensors")
    assert target.family == name.removesuffix("_target")
    assert target.name == name
    assert (target.vocabulary_size, target.context_length, target.stop_token_ids) == (160, 512, (129,))
    backbone = target.backbone
    assert (backbone.hidden_size, backbone.intermediate_size, backbone.norm_epsilon) == (64, 160, 1e-6)
    assert (backbone.head_count, backbone.kv_head_count, backbone.head_dim) == (4, 2, 16)
    assert backbone.layers == (Layer(),) * 8
    np.testing.assert_allclose(backbone.rope.inverse_frequencies, 10000.0 ** -(np.arange(0, 16, 2) / 16), rtol=1e-6)
    assert target.files == (golden / name / "model.safetensors",)
    assert target.text.tokenizer == (golden / name / "tokenizer.json").read_text()
    assert target.text.special_tokens == {"eos_token": "<eos>"}
    assert target.tensors.keys() == {key.removeprefix("model.") for key in stored}
    assert ("lm_head.weight" in target.tensors) == (name == "qwen3_target")
    for key in ("embed_tokens.weight", "layers.7.mlp.down_proj.weight", "norm.weight"):
        np.testing.assert_array_equal(target.tensors[key].load(), stored[f"model.{key}"])


def test_reads_bfloat16_shards(copy: Copy) -> None:
    checkpoint = copy("qwen3_target")
    folder, tensors = checkpoint.folder, checkpoint.tensors
    (folder / "model.safetensors").unlink()
    rounded = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    places = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: rounded[name] for name in places if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    target = read_target(folder)
    assert [file.name for file in target.files] == [f"model-{index}.safetensors" for index in range(3)]
    for name, tensor in rounded.items():
        read = target.tensors[name.removeprefix("model.")].load()
        np.testing.assert_array_equal(read, tensor.astype(np.float32))


def stop_ids(config: Any, generation: Any) -> Edit:
    def edit(checkpoint: Checkpoint) -> None:
        checkpoint.config["eos_token_id"] = config
        path = checkpoint.folder / "generation_config.json"
        path.unlink()
        if generation != "no file":
            path.write_text(json.dumps(generation))

    return edit


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (129, {"eos_token_id": [7, 129, 3]}, (3, 7, 129)),
        ([5, 4], {"eos_token_id": 6}, (4, 5, 6, 129)),
        (129, {}, (129,)),
        (None, {"eos_token_id": 0}, (0, 129)),
        (129, "no file", (129,)),
        (128, "no file", (128, 129)),
        (None, "no file", (129,)),
    ],
)
def test_stops_at_the_union_with_the_tokenizers_end(
    copy: Copy, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    checkpoint = copy("llama_target")
    stop_ids(config, generation)(checkpoint)
    assert read_target(checkpoint.write()).stop_token_ids == expected


def synthetic(family: str, *, biases: tuple[str, ...] = (), **config: Any) -> Target:
    """A target of random shapes: head_dim is not hidden/heads, two key heads, three layers."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    full = {**sizes, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 32, "model_type": family, **config}
    head, kv_heads = full["head_dim"] or 6, full["num_key_value_heads"] or 4
    shapes = {"embed_tokens.weight": (32, 24), "norm.weight": (24,), "lm_head.weight": (32, 24)}
    for index in range(3):
        layer = {
            "self_attn.q_proj": (4 * head, 24),
            "self_attn.k_proj": (kv_heads * head, 24),
            "self_attn.v_proj": (kv_heads * head, 24),
            "self_attn.o_proj": (24, 4 * head),
            "mlp.gate_proj": (40, 24),
            "mlp.up_proj": (40, 24),
            "mlp.down_proj": (24, 40),
            "input_layernorm": (24,),
            "post_attention_layernorm": (24,),
        }
        if family == "qwen3":
            layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        for name, shape in layer.items():
            shapes[f"layers.{index}.{name}.weight"] = shape
            if name in biases:
                shapes[f"layers.{index}.{name}.bias"] = shape[:1]
    tensors = {name: StubTensor(name, shape) for name, shape in shapes.items()}
    return target_from_config(full, {}, tensors, TextAssets(None, None, {}), "synthetic", ())


class StubTensor(LazyTensor):
    """A tensor that must not be read."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        raise AssertionError(f"{self.name} was read")


ALL = (*QKV, "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.mark.parametrize(
    ("family", "biases", "config"),
    [
        ("llama", (), {}),
        ("llama", ALL, {"attention_bias": True}),
        ("llama", MLP, {"mlp_bias": True}),
        ("llama", ALL + MLP, {"attention_bias": True, "mlp_bias": True}),
        ("mistral", (), {}),
        ("mistral", (), {"attention_bias": True}),
        ("qwen2", QKV, {}),
        ("qwen2", QKV, {"attention_bias": False}),
        ("qwen3", (), {}),
        ("qwen3", ALL, {"attention_bias": True}),
        ("llama", (), {"attention_bias": None, "mlp_bias": None, "sliding_window": None, "use_sliding_window": None}),
    ],
)
def test_families_have_their_tensors(family: str, biases: tuple[str, ...], config: dict[str, Any]) -> None:
    target = synthetic(family, biases=biases, **config)
    assert target.family == family
    assert target.backbone.head_dim == 10
    assert any(name.endswith(".bias") for name in target.tensors) == bool(biases)


@pytest.mark.parametrize(
    ("family", "biases", "config", "message"),
    [
        ("llama", QKV, {}, "unexpected layers.0.self_attn.k_proj.bias.*attention_bias = False"),
        ("llama", QKV, {"attention_bias": True}, "lacks layers.0.self_attn.o_proj.bias"),
        ("llama", (), {"mlp_bias": True}, "lacks layers.0.mlp.down_proj.bias"),
        ("qwen2", (), {}, "lacks layers.0.self_attn.k_proj.bias"),
        ("qwen2", ALL, {}, "unexpected layers.0.self_attn.o_proj.bias"),
        ("qwen3", (), {"attention_bias": True}, "lacks layers.0.self_attn.k_proj.bias"),
        ("mistral", QKV, {"attention_bias": True}, "unexpected layers.0.self_attn.k_proj.bias"),
    ],
)
def test_biases_must_be_as_the_family_says(
    family: str, biases: tuple[str, ...], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        synthetic(family, biases=biases, **config)


def test_null_heads_are_inferred() -> None:
    backbone = synthetic("llama", head_dim=None, num_key_value_heads=None).backbone
    assert (backbone.head_dim, backbone.kv_head_count) == (6, 4)


SLIDING = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("family", "config", "windows"),
    [
        ("llama", {"sliding_window": 8, "layer_types": SLIDING}, (None, None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {}, (4096, 4096, 4096)),
        ("mistral", {"sliding_window": 8, "layer_types": SLIDING}, (8, 8, 8)),
        ("qwen2", {"sliding_window": 8}, (None, None, None)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True}, (None, None, None)),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None, None, None)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": SLIDING}, (None, 8, None)),
        ("qwen3", {"layer_types": ["full_attention"] * 3, "use_sliding_window": True}, (None, None, None)),
    ],
)
def test_sliding_windows(family: str, config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    target = synthetic(family, biases=QKV if family == "qwen2" else (), **config)
    assert target.backbone.layers == tuple(Layer(window, causal=True) for window in windows)
    transformers = pytest.importorskip("transformers")
    classes = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
    theirs = getattr(transformers, classes[family])(num_hidden_layers=3, **config)
    types = getattr(theirs, "layer_types", None) if family.startswith("qwen") else None
    everywhere = theirs.sliding_window if family == "mistral" else None
    assert windows == tuple(
        (theirs.sliding_window if types[index] == "sliding_attention" else None) if types else everywhere
        for index in range(3)
    )


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
        ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": None}),
        ("Mistral", {"sliding_window": 16, "num_key_value_heads": 1}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("Qwen3", {"attention_bias": True, "head_dim": 10, "num_key_value_heads": 2}),
    ],
)
def test_reads_what_transformers_writes(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    scaling = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    parameters = scaling | {"original_max_position_embeddings": 64}
    full = getattr(transformers, f"{family}Config")(
        **{"num_key_value_heads": 4, **sizes, **config},
        max_position_embeddings=128,
        rope_parameters=parameters,
        eos_token_id=3,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(full)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    target = read_target(tmp_path)
    state = {name.removeprefix("model."): tensor.numpy() for name, tensor in model.state_dict().items()}
    if full.tie_word_embeddings:
        del state["lm_head.weight"]
    assert target.tensors.keys() == state.keys()
    for name, values in state.items():
        np.testing.assert_array_equal(target.tensors[name].load(), values)
    assert len(target.files) > 1
    assert target.stop_token_ids == (3,)
    frequencies = model.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(target.backbone.rope.inverse_frequencies, frequencies, rtol=1e-6)


def test_rotation_tables_and_prefixes_are_dropped(copy: Copy) -> None:
    checkpoint = copy("llama_target")
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    checkpoint.tensors["lm_head.weight"] = np.zeros((160, 64), np.float32)
    target = read_target(checkpoint.write())
    assert not any("rotary_emb" in name or name.startswith("model.") for name in target.tensors)
    assert "lm_head.weight" not in target.tensors, "tied, so stored once"


def test_a_tied_model_may_hold_its_table_as_lm_head(copy: Copy) -> None:
    checkpoint = copy("llama_target")
    checkpoint.rename("model.embed_tokens.weight", "lm_head.weight")
    target, expected = read_target(checkpoint.write()), read_target(GOLDEN / "llama_target")
    assert target.tensors.keys() == expected.tensors.keys()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        np.testing.assert_array_equal(target.tables[name].load(), expected.tables[name].load())


def test_swish_is_silu(copy: Copy) -> None:
    checkpoint = copy("llama_target")
    checkpoint.config["hidden_act"] = "swish"
    assert read_target(checkpoint.write()).backbone == read_target(GOLDEN / "llama_target").backbone


def test_what_a_user_should_know_is_noted(copy: Copy) -> None:
    checkpoint = copy("llama_target")
    checkpoint.config["eos_token_id"] = 128
    (checkpoint.folder / "generation_config.json").unlink()
    assert read_target(checkpoint.write()).notes == (
        "texts end at 128 (eos_token_id of the configuration), 129 ('<eos>', the tokenizer's eos_token)",
    )
    (checkpoint.folder / "tokenizer.json").unlink()
    (checkpoint.folder / "tekken.json").write_text("{}")
    missing, stops = read_target(checkpoint.folder).notes
    assert missing.endswith("has no tokenizer.json (tekken.json is not read): the bundle takes token ids, no text")
    assert stops == "texts end at 128 (eos_token_id of the configuration)"


def set_config(**values: Any) -> Edit:
    return lambda checkpoint: checkpoint.config.update(values)


def unset(*keys: str) -> Edit:
    return lambda checkpoint: [checkpoint.config.pop(key) for key in keys]


def drop(*names: str) -> Edit:
    return lambda checkpoint: checkpoint.drop(*names)


def add(name: str, *shape: int) -> Edit:
    return lambda checkpoint: checkpoint.reshape(name, *shape)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_config(architectures=["Gemma3ForCausalLM"]), "'Gemma3ForCausalLM' is not supported; supported are Llama"),
        (set_config(architectures=None, model_type="gemma"), "model_type 'gemma' is not supported"),
        (set_config(architectures=None, model_type=None), "model_type None is not supported"),
        (set_config(architectures="Qwen3ForCausalLM"), "architectures = 'Qwen3ForCausalLM'"),
        (set_config(model_type="llama"), "'Qwen3ForCausalLM' contradicts model_type 'llama'"),
        (set_config(hidden_act="gelu"), "hidden_act = 'gelu'; it should be 'silu'"),
        (set_config(quantization_config={"quant_method": "gptq"}), r"quantization_config \(gptq\) is not supported"),
        (set_config(hidden_size="64"), "hidden_size = '64'"),
        (set_config(num_hidden_layers=True), "num_hidden_layers = True"),
        (set_config(rms_norm_eps=None), "rms_norm_eps = None"),
        (set_config(intermediate_size=-1), "intermediate_size = -1"),
        (set_config(num_attention_heads=5), "num_attention_heads = 5 is no multiple of num_key_value_heads = 2"),
        (set_config(hidden_size=32), r"has the shape \[160, 64\]; \[160, 32\] is needed"),
        (set_config(head_dim=8), r"q_proj.weight has the shape \[64, 64\]; \[32, 64\] is needed"),
        (set_config(num_key_value_heads=4), r"k_proj.weight has the shape \[32, 64\]"),
        (set_config(vocab_size=150), r"embed_tokens.weight has the shape \[160, 64\]; \[150, 64\]"),
        (set_config(num_hidden_layers=9, layer_types=None), "lacks layers.8.input_layernorm.weight.*and 7 more"),
        (set_config(num_hidden_layers=7, layer_types=None), "unexpected layers.7.input_layernorm.weight"),
        (set_config(num_hidden_layers=7), "layer_types has 8 entries for 7 layers"),
        (set_config(layer_types=["sliding_attention"] * 8), "sliding_window is null"),
        (set_config(layer_types=["chunked_attention"] * 8), "layer_types.0 = 'chunked_attention'"),
        (set_config(rope_parameters={"rope_type": "su", "rope_theta": 1e4}), "RoPE type 'su' is not supported"),
        (set_config(eos_token_id=160), "eos_token_id = 160; ids below the vocabulary size 160"),
        (set_config(eos_token_id=["2"]), r"eos_token_id = \['2'\]"),
        (set_config(eos_token_id=True), "eos_token_id = True"),
        (set_config(dspark_block_size=5), r"bundled in one checkpoint \(dspark_block_size\), as DeepSeek-V4"),
        (add("mtp.0.norm.weight", 64), r"bundled in one checkpoint \(mtp.0.norm.weight\)"),
        (drop("lm_head.weight"), "lacks lm_head.weight, but tie_word_embeddings is false"),
        (drop("model.norm.weight"), "lacks norm.weight"),
        (drop("model.layers.3.self_attn.q_norm.weight"), "lacks layers.3.self_attn.q_norm.weight"),
        (add("model.layers.0.mlp.gate.weight", 4, 64), "unexpected layers.0.mlp.gate.weight"),
        (add("norm.weight", 64), "norm.weight twice, with and without"),
        (
            lambda checkpoint: (checkpoint.folder / "generation_config.json").write_text("[]"),
            "generation_config.json holds",
        ),
        (lambda checkpoint: (checkpoint.folder / "generation_config.json").write_text("{"), "config.json is not JSON"),
    ],
)
def test_refusals(copy: Copy, edit: Edit, message: str) -> None:
    checkpoint = copy("qwen3_target")
    edit(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        read_target(checkpoint.write())


def test_what_is_no_folder(tmp_path: Path, copy: Copy) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        read_target(tmp_path / "nowhere")
    checkpoint = copy("llama_target")
    (checkpoint.folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"llama_target has no config\.json"):
        read_target(checkpoint.folder)


def test_pickles_are_refused(copy: Copy) -> None:
    checkpoint = copy("llama_target")
    (checkpoint.folder / "model.safetensors").rename(checkpoint.folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        read_target(checkpoint.folder)
