"""GGUF files written as llama.cpp's converter writes them must read back as the Hugging Face side."""

import json
import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file

from dspark.exporter.checkpoints import read_target
from dspark.exporter.checkpoints.description import Target, TextAssets
from dspark.exporter.checkpoints.gguf import read_gguf
from dspark.exporter.checkpoints.gguf_file import read_gguf_file
from dspark.exporter.checkpoints.target import read_target_folder, target_from_config
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "golden"
Q = gguf.GGMLQuantizationType
LAYERS, VOCABULARY = 2, 96

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "eos_token_id": 7,
}


class ArrayTensor(LazyTensor):
    def __init__(self, name: str, array: NDArray[np.float32]) -> None:
        self.name, self.shape, self._array = name, array.shape, array

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._array[start:stop]


def hf_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights under Hugging Face's names without ``model.``."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCABULARY, hidden), "norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, hidden)
    biased = {"q", "k", "v"} if config["model_type"] == "qwen2" else set("qkvo" if config["attention_bias"] else "")
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        rows = {"q": query, "k": key, "v": key, "o": hidden}
        for letter, count in rows.items():
            shapes[f"{prefix}self_attn.{letter}_proj.weight"] = (count, query if letter == "o" else hidden)
            if letter in biased:
                shapes[f"{prefix}self_attn.{letter}_proj.bias"] = (count,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{prefix}self_attn.{letter}_norm.weight": (dim,) for letter in "qk"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def hf_target(config: dict[str, Any], tensors: dict[str, NDArray[np.float32]]) -> Target:
    lazy = {name: ArrayTensor(name, array) for name, array in tensors.items()}
    return target_from_config(config, {}, lazy, TextAssets(None, None, {}), "reference", ())


def interleaved(weights: NDArray[Any], head_count: int) -> NDArray[Any]:
    """The converter's permutation of Q and K: row ``(half, pair)`` of a head becomes row ``(pair, half)``."""
    halves = weights.reshape(head_count, 2, -1, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def start_writer(path: Path, config: dict[str, Any], architecture: str | None = None) -> gguf.GGUFWriter:
    """A writer that has been given the metadata of a converted model, without tokenizer."""
    writer = gguf.GGUFWriter(path, architecture or config["model_type"])
    writer.add_type("model")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "rope_theta" in config:
        writer.add_rope_freq_base(config["rope_theta"])
    writer.add_eos_token_id(config["eos_token_id"])
    return writer


def add_tensors(
    writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, NDArray[np.float32]], kind: Any = Q.F32
) -> None:
    """Adds weights under llama.cpp's names, in its order of rows; only matrices are quantised."""
    architecture = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
    names = gguf.get_tensor_name_map(architecture[writer.arch], config["num_hidden_layers"])
    for name, tensor in tensors.items():
        full = name if name.startswith("lm_head") else f"model.{name}"
        if writer.arch == "llama" and ".q_proj." in name:
            tensor = interleaved(tensor, config["num_attention_heads"])
        if writer.arch == "llama" and ".k_proj." in name:
            tensor = interleaved(tensor, config["num_key_value_heads"])
        stored = kind if tensor.ndim == 2 else Q.F32
        writer.add_tensor(
            names.get_name(full, try_suffixes=(".weight", ".bias")), gguf.quantize(tensor, stored), raw_dtype=stored
        )


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(path: Path, config: dict[str, Any], tensors: dict[str, NDArray[np.float32]], kind: Any = Q.F32) -> Path:
    writer = start_writer(path, config)
    add_tensors(writer, config, tensors, kind)
    finish(writer)
    return path


CASES = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama biases": {"model_type": "llama", "attention_bias": True},
    "llama wide heads": {"model_type": "llama", "head_dim": 24},
    "llama multi-query": {"model_type": "llama", "num_key_value_heads": 1},
    "llama multi-head": {"model_type": "llama", "num_key_value_heads": 4},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0, "rms_norm_eps": 1e-6},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_reads_back_as_it_was(case: str, tmp_path: Path) -> None:
    config = BASE | CASES[case]
    tensors = hf_tensors(config)
    expected = hf_target(config, tensors)
    path = write(tmp_path / "tiny model.gguf", config, tensors)
    target = read_gguf(path)
    assert target.backbone == expected.backbone
    assert (target.family, target.name, target.files) == (config["model_type"], "tiny model", (path,))
    assert (target.vocabulary_size, target.context_length, target.stop_token_ids) == (VOCABULARY, 512, (7,))
    assert (target.text.tokenizer, target.text.chat_template, target.text.special_tokens) == (None, None, {})
    assert set(target.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert target.tensors[name].shape == tensor.shape
        np.testing.assert_array_equal(target.tensors[name].load(), tensor, err_msg=name)


@pytest.mark.parametrize("name", ["llama_target", "qwen3_target"])
def test_a_converted_folder_reads_as_the_folder(name: str, tmp_path: Path) -> None:
    folder = read_target_folder(GOLDEN / name)
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    stored = load_file(GOLDEN / name / "model.safetensors")
    tensors = {key.removeprefix("model."): array.astype(np.float32) for key, array in stored.items()}
    target = read_gguf(write(tmp_path / "model.gguf", config, {key: tensors[key] for key in folder.tensors}))
    assert target.backbone == folder.backbone
    assert target.stop_token_ids == folder.stop_token_ids
    for key, tensor in folder.tensors.items():
        np.testing.assert_array_equal(target.tensors[key].load(), tensor.load(), err_msg=key)


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_quantised_matrices_are_dequantised(kind: Any, tmp_path: Path) -> None:
    config = BASE | CASES["llama"]
    tensors = hf_tensors(config)
    target = read_gguf(write(tmp_path / "model.gguf", config, tensors, kind))
    for name, tensor in tensors.items():
        stored = kind if tensor.ndim == 2 else Q.F32
        # Rows are quantised one by one, so that their order does not matter.
        expected = gguf.dequantize(gguf.quantize(tensor, stored), stored)
        np.testing.assert_array_equal(target.tensors[name].load(), expected, err_msg=name)
        assert np.abs(expected - tensor).max() < {Q.Q4_0: 0.4, Q.Q4_1: 0.3, Q.Q5_0: 0.2, Q.Q5_1: 0.2}.get(kind, 0.03)


def q4_k_block() -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """A block of d = 0.5, dmin = 0.25, all scales 3 and minima 2: values 0.5·3·q − 0.25·2."""
    scales = np.array([3] * 4 + [2] * 4 + [3 | 2 << 4] * 4, np.uint8)
    quants = np.arange(128, dtype=np.uint8)
    values = np.concatenate([nibbles for chunk in quants.reshape(4, 32) for nibbles in (chunk & 15, chunk >> 4)])
    header = np.array([0.5, 0.25], np.float16).view(np.uint8)
    return np.concatenate([header, scales, quants]), (1.5 * values - 0.5).astype(np.float32)


def q6_k_block() -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """A block of d = 0.5, all scales −2: values 0.5·−2·(q − 32), the upper bits of q all 10."""
    low = np.arange(128, dtype=np.uint8)
    high = np.full(64, 0b10101010, np.uint8)
    scales = np.full(16, -2, np.int8).view(np.uint8)
    nibbles = [(half[0] & 15, half[1] & 15, half[0] >> 4, half[1] >> 4) for half in low.reshape(2, 2, 32)]
    values = -np.concatenate(nibbles).astype(np.float32).ravel()
    return np.concatenate([low, high, scales, np.array([0.5], np.float16).view(np.uint8)]), values


@pytest.mark.parametrize(("kind", "block"), [(Q.Q4_K, q4_k_block()), (Q.Q6_K, q6_k_block())])
def test_k_quants_are_dequantised(
    kind: Any, block: tuple[NDArray[np.uint8], NDArray[np.float32]], tmp_path: Path
) -> None:
    data, values = block
    writer = gguf.GGUFWriter(tmp_path / "blocks.gguf", "llama")
    writer.add_tensor("matrix", np.tile(data, (5, 2)), raw_dtype=kind)
    finish(writer)
    tensor = read_gguf_file(tmp_path / "blocks.gguf").tensors["matrix"]
    assert tensor.shape == (5, 512)
    np.testing.assert_array_equal(tensor.rows(1, 4), np.tile(values, (3, 2)))


@given(data=st.data())
def test_any_rows_of_interleaved_heads(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "heads.gguf"
    config = BASE | CASES["llama biases"]
    tensors = hf_tensors(config)
    if not path.exists():
        write(path, config, tensors)
    name = data.draw(st.sampled_from([f"layers.0.self_attn.{x}" for x in ("q_proj.weight", "k_proj.bias")]))
    count = tensors[name].shape[0]
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    np.testing.assert_array_equal(read_gguf(path).tensors[name].rows(start, stop), tensors[name][start:stop])


def test_rows_of_a_large_tensor_are_read_alone(tmp_path: Path) -> None:
    rows, width = 1 << 18, 1024
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor_info("token_embd.weight", (rows, width), np.dtype(np.float16), 2 * rows * width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = -(-path.stat().st_size // 32) * 32
    marked = 200_000
    with path.open("r+b") as file:  # sparse: half a gigabyte of which one row is written
        file.truncate(header + 2 * rows * width)
        file.seek(header + 2 * marked * width)
        file.write(np.arange(width, dtype=np.float16).tobytes())
    tracemalloc.start()
    tensor = read_gguf_file(path).tensors["token_embd.weight"]
    part = tensor.rows(marked - 1, marked + 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(part, [np.zeros(width), np.arange(width), np.zeros(width)])
    assert peak < 2 << 20


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "linear in older files": ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    "yarn in full": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_attn_factor": 1.25,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
        },
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.25,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
}


def add_values(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add[type(value)](key, value)


@pytest.mark.parametrize("case", ROPES)
def test_rope_scaling(case: str, tmp_path: Path) -> None:
    keys, scaling = ROPES[case]
    config = BASE | {"model_type": "qwen2", "rope_theta": 50000.0}
    tensors = hf_tensors(config)
    writer = start_writer(tmp_path / "model.gguf", config)
    add_values(writer, {f"qwen2.{key}": value for key, value in keys.items()})
    add_tensors(writer, config, tensors)
    finish(writer)
    target = read_gguf(tmp_path / "model.gguf")
    expected = hf_target(config | {"rope_scaling": scaling or None}, tensors)
    assert target.backbone == expected.backbone
    assert target.context_length == expected.context_length
    plain = hf_target(config, tensors).backbone.rope
    assert (target.backbone.rope == plain) == (case == "none")


def test_the_rope_base_is_10000_unless_given(tmp_path: Path) -> None:
    config = {key: value for key, value in (BASE | CASES["qwen3"]).items() if key != "rope_theta"}
    tensors = hf_tensors(config)
    target = read_gguf(write(tmp_path / "model.gguf", config, tensors))
    assert target.backbone.rope == hf_target(config | {"rope_theta": 10000.0}, tensors).backbone.rope


def test_llama3_scaling_is_a_tensor_of_divisors(tmp_path: Path) -> None:
    config = BASE | {"model_type": "llama", "rope_theta": 500000.0}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    tensors = hf_tensors(config)
    divisors = []  # as the converter works them out, pair by pair
    for pair in range(8):
        wavelength = 2 * math.pi * 500000.0 ** (2 * pair / 16)
        smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
        blended = 1 / ((1 - smooth) / 8.0 + smooth)
        divisors.append(1.0 if wavelength < 64 / 4.0 else 8.0 if wavelength > 64 / 1.0 else blended)
    assert 1.0 in divisors
    assert 8.0 in divisors
    assert any(1.0 < divisor < 8.0 for divisor in divisors)
    writer = start_writer(tmp_path / "model.gguf", config)
    add_tensors(writer, config, tensors)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    finish(writer)
    rope = read_gguf(tmp_path / "model.gguf").backbone.rope
    expected = hf_target(config | {"rope_scaling": {"rope_type": "llama3"} | scaling}, tensors).backbone.rope
    np.testing.assert_allclose(rope.inverse_frequencies, expected.inverse_frequencies, rtol=1e-6, atol=0)
    assert (rope.magnitude, rope.dynamic) == (1.0, None)


def test_a_sliding_window_makes_a_llama_file_a_mistral(tmp_path: Path) -> None:
    for architecture, family in (("llama", "mistral"), ("qwen3", "qwen3")):
        path = tmp_path / f"{architecture}.gguf"
        config = BASE | {"model_type": architecture}
        writer = start_writer(path, config)
        writer.add_sliding_window(48)
        add_tensors(writer, config, hf_tensors(config))
        finish(writer)
        target = read_gguf(path)
        assert target.family == family
        assert [layer.window for layer in target.backbone.layers] == [48] * LAYERS


def test_every_end_of_turn_stops(tmp_path: Path) -> None:
    config = BASE | CASES["qwen2"]
    writer = start_writer(tmp_path / "model.gguf", config)
    writer.add_eot_token_id(9)
    writer.add_eom_token_id(3)
    add_tensors(writer, config, hf_tensors(config))
    finish(writer)
    assert read_gguf(tmp_path / "model.gguf").stop_token_ids == (3, 7, 9)


ENDS = ("<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")


def vocabulary(**control: int) -> dict[str, Any]:
    """A tokenizer's metadata in which the given texts are control tokens."""
    tokens = [f"t{id_}" for id_ in range(VOCABULARY)]
    types = [int(gguf.TokenType.NORMAL)] * VOCABULARY
    for text, id_ in control.items():
        tokens[id_], types[id_] = text, int(gguf.TokenType.CONTROL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
    }


def with_values(path: Path, values: dict[str, Any], **config: Any) -> Path:
    """A tiny Llama with further metadata."""
    full = BASE | CASES["llama"] | config
    writer = start_writer(path, full)
    for key in values:
        writer.kv_data[0].pop(key, None)
    add_values(writer, values)
    add_tensors(writer, full, hf_tensors(BASE | CASES["llama"]))
    finish(writer)
    return path


@pytest.mark.parametrize("text", ENDS)
def test_a_control_token_that_is_called_an_end_stops(text: str, tmp_path: Path) -> None:
    target = read_gguf(with_values(tmp_path / "model.gguf", vocabulary(**{text: 20, "<|start|>": 21})))
    assert target.stop_token_ids == (7, 20)
    (note,) = [note for note in target.notes if note.startswith("texts end at")]
    assert "7 (eos_token_id of the configuration)" in note
    assert f"20 ({text!r}, a control token of that name)" in note


def test_a_text_that_only_looks_like_an_end_does_not_stop(tmp_path: Path) -> None:
    values = vocabulary(**{"<|im_end|>": 20})
    values["tokenizer.ggml.token_type"][20] = int(gguf.TokenType.NORMAL)
    assert read_gguf(with_values(tmp_path / "model.gguf", values)).stop_token_ids == (7,)


def test_a_model_without_stops_says_so(tmp_path: Path) -> None:
    config = BASE | CASES["llama"]
    writer = start_writer(tmp_path / "model.gguf", config)
    writer.kv_data[0].pop("tokenizer.ggml.eos_token_id")
    add_tensors(writer, config, hf_tensors(config))
    finish(writer)
    notes = read_gguf(tmp_path / "model.gguf").notes
    assert any("no token is known to end a text" in note for note in notes)
    assert any("has no tokenizer: the bundle takes token ids" in note for note in notes)


UNUSED_IDS = [
    ("padding", {}),
    ("unknown", {}),
    ("bos", {"tokenizer.ggml.add_bos_token": False}),
]


@pytest.mark.parametrize("id_", [VOCABULARY, 4294967295])
@pytest.mark.parametrize(("name", "values"), UNUSED_IDS)
def test_an_unused_id_outside_the_vocabulary_is_dropped(
    name: str, values: dict[str, Any], id_: int, tmp_path: Path
) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    target = read_gguf(with_values(tmp_path / "model.gguf", vocabulary() | values | {key: id_}))
    assert target.text.special_tokens == {"eos_token": "t7"}
    assert any(note.startswith(f"{key} is {id_}, but there are 96 tokens; nothing uses it") for note in target.notes)


@pytest.mark.parametrize("name", ["eos", "bos"])
def test_a_used_id_outside_the_vocabulary_is_refused(name: str, tmp_path: Path) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    with pytest.raises(CheckpointError, match=f"{key} is 4294967295, but there are 96 tokens"):
        read_gguf(with_values(tmp_path / "model.gguf", vocabulary() | {key: 4294967295}))


WRONG_TYPES: dict[str, tuple[Any, str]] = {
    "split.count": ("two", "'two' (str); a whole number is needed"),
    "general.architecture": (5, "5 (int); a text is needed"),
    "general.type": (5, "5 (int); a text is needed"),
    "tokenizer.ggml.model": (5, "5 (int); a text is needed"),
    "tokenizer.ggml.pre": (5, "5 (int); a text is needed"),
    "tokenizer.ggml.tokens": (5, "5 (int); a list, each a text, is needed"),
    "tokenizer.ggml.token_type": ("x", "'x' (str); a list, each a whole number, is needed"),
    "tokenizer.ggml.merges": ([1, 2], "1 (int); a text is needed"),
    "tokenizer.ggml.eos_token_id": ([7], "[7] (list); a whole number is needed"),
    "tokenizer.ggml.bos_token_id": ("7", "'7' (str); a whole number is needed"),
    "tokenizer.ggml.eot_token_id": (7.5, "7.5 (float); a whole number is needed"),
    "tokenizer.ggml.padding_token_id": (True, "True (bool); a whole number is needed"),
    "tokenizer.ggml.add_bos_token": (1, "1 (int); true or false is needed"),
    "tokenizer.chat_template": (5, "5 (int); a text is needed"),
    "llama.block_count": ("2", "'2' (str); a whole number is needed"),
    "llama.attention.head_count": ([4.0, 4.0], "4.0 (float); a whole number is needed"),
    "llama.attention.layer_norm_rms_epsilon": ("tiny", "'tiny' (str); a number is needed"),
    "llama.attention.sliding_window": ("wide", "'wide' (str); a whole number is needed"),
    "llama.rope.freq_base": (False, "False (bool); a number is needed"),
    "llama.rope.scaling.type": (1, "1 (int); a text is needed"),
    "general.alignment": ("32", "'32' (str); a whole number is needed"),
}


@pytest.mark.parametrize("key", WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_one_line(key: str, tmp_path: Path) -> None:
    value, message = WRONG_TYPES[key]
    path = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError) as error:
        read_gguf(with_values(path, vocabulary() | {key: value}))
    assert str(error.value) == f"{path}: {key} is {message}."


@pytest.mark.parametrize("key", ["tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix"])
def test_a_sentencepiece_value_of_the_wrong_type_is_one_line(key: str, tmp_path: Path) -> None:
    values = vocabulary() | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * VOCABULARY}
    with pytest.raises(CheckpointError, match=f"{key} is 5 \\(int\\)"):
        read_gguf(with_values(tmp_path / "model.gguf", values | {key: 5}))


@pytest.mark.parametrize("name", ["model.GGUF", "sha256-4d7a214614ab2935", "model"])
def test_the_first_bytes_decide_what_is_gguf(name: str, tmp_path: Path) -> None:
    config = BASE | CASES["llama"]
    target = read_target(write(tmp_path / name, config, hf_tensors(config)))
    assert target.backbone == hf_target(config, hf_tensors(config)).backbone


def test_another_file_is_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"model\.bin is not a folder and no GGUF file"):
        read_target(tmp_path / "model.bin")


def test_head_counts_may_be_listed_layer_by_layer(tmp_path: Path) -> None:
    config = BASE | CASES["qwen2"]
    tensors = hf_tensors(config)
    lists = {"num_key_value_heads": [2] * LAYERS, "intermediate_size": [96] * LAYERS}
    writer = start_writer(tmp_path / "model.gguf", config | lists)
    add_tensors(writer, config, tensors)
    finish(writer)
    assert read_gguf(tmp_path / "model.gguf").backbone == hf_target(config, tensors).backbone


def test_head_dimension_and_kv_heads_have_defaults(tmp_path: Path) -> None:
    config = BASE | {"model_type": "llama", "num_key_value_heads": 4}
    tensors = hf_tensors(config)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tensors(writer, config, tensors)
    finish(writer)
    target = read_gguf(path)
    assert target.backbone == hf_target(config, tensors).backbone
    assert target.stop_token_ids == ()


REFUSED_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"llama.expert_count": 8}, "llama.expert_count = 8"),
    "attention scale": ({"llama.attention.scale": 0.5}, "llama.attention.scale = 0.5"),
    "soft cap": ({"llama.attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping = 50.0"),
    "encoder": ({"llama.attention.causal": False}, "llama.attention.causal = False"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'; supported are none"),
    "partial rotation": ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8 of 16"),
    "split": ({"split.count": 3}, "one of 3 parts; join them first"),
    "window pattern": ({"llama.attention.sliding_window_pattern": [True, False]}, "sliding_window_pattern"),
    "too many tokens": ({"tokenizer.ggml.tokens": [f"t{i}" for i in range(97)]}, "97 tokens, but embeddings for 96"),
    "tokenizer": (
        {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "t5", "tokenizer.ggml.eos_token_id": 0},
        "tokenizer.ggml.model is 't5'",
    ),
}


@pytest.mark.parametrize("case", REFUSED_VALUES)
def test_values_that_are_refused(case: str, tmp_path: Path) -> None:
    values, message = REFUSED_VALUES[case]
    config = BASE | CASES["llama"]
    writer = start_writer(tmp_path / "model.gguf", config)
    writer.kv_data[0].pop("tokenizer.ggml.eos_token_id")
    add_values(writer, values)
    add_tensors(writer, config, hf_tensors(config))
    finish(writer)
    with pytest.raises(CheckpointError) as error:
        read_gguf(tmp_path / "model.gguf")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": [2, 4]}, r"llama.attention.head_count_kv differs between layers \(\[2, 4\]\)"),
        ({"intermediate_size": [96, 64]}, "llama.feed_forward_length differs between layers"),
        ({"num_attention_heads": 0}, "llama.attention.head_count is 0; a positive whole number"),
        ({"num_hidden_layers": 3}, "lacks layers.2"),
        ({"num_hidden_layers": 1 << 31}, "2147483648 layers cannot be made of 21 tensors"),
        ({"hidden_size": 32}, r"\[96, 64\]; \[96, 32\]"),
        ({"eos_token_id": 96}, "eos_token_id"),
    ],
)
def test_sizes_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = BASE | CASES["llama"]
    writer = start_writer(tmp_path / "model.gguf", config | change)
    add_tensors(writer, config, hf_tensors(config))
    finish(writer)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(tmp_path / "model.gguf")


def test_different_key_and_value_lengths_are_refused(tmp_path: Path) -> None:
    config = BASE | CASES["llama"]
    writer = start_writer(tmp_path / "model.gguf", config)
    writer.kv_data[0].pop("llama.attention.value_length")
    writer.add_value_length(8)
    add_tensors(writer, config, hf_tensors(config))
    finish(writer)
    with pytest.raises(CheckpointError, match="keys and values of different lengths"):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("key", ["llama.block_count", "llama.attention.layer_norm_rms_epsilon", "llama.context_length"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    config = BASE | CASES["llama"]
    writer = start_writer(tmp_path / "model.gguf", config)
    writer.kv_data[0].pop(key)
    add_tensors(writer, config, hf_tensors(config))
    finish(writer)
    with pytest.raises(CheckpointError, match=f"lacks the metadata key {key}"):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "rope_factors_long.weight", "blk.0.attn_sinks"])
def test_an_unknown_tensor_is_named(name: str, tmp_path: Path) -> None:
    config = BASE | CASES["llama"]
    writer = start_writer(tmp_path / "model.gguf", config)
    add_tensors(writer, config, hf_tensors(config))
    writer.add_tensor(name, np.zeros((4, 4), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=f"has the tensor {name}"):
        read_gguf(tmp_path / "model.gguf")


def test_a_tensor_of_another_architecture_is_named(tmp_path: Path) -> None:
    config = BASE | CASES["llama"]
    writer = start_writer(tmp_path / "model.gguf", config)
    add_tensors(writer, config, hf_tensors(config))
    writer.add_tensor("blk.0.attn_q_norm.weight", np.zeros(16, np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_norm\.weight"):
        read_gguf(tmp_path / "model.gguf")


def test_divisors_for_another_head_are_refused(tmp_path: Path) -> None:
    config = BASE | CASES["llama"]
    writer = start_writer(tmp_path / "model.gguf", config)
    add_tensors(writer, config, hf_tensors(config))
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight has the shape \(4,\); \(8,\) is needed"):
        read_gguf(tmp_path / "model.gguf")


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma2")
    finish_header(writer)
    with pytest.raises(CheckpointError, match="architecture 'gemma2'; supported are llama, qwen2, qwen3"):
        read_gguf(tmp_path / "model.gguf")


def test_adapters_and_projectors_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_type("adapter")
    finish_header(writer)
    with pytest.raises(CheckpointError, match=r"'adapter' file.*merge it into its base first"):
        read_gguf(tmp_path / "model.gguf")


def test_a_model_without_embeddings_is_refused(tmp_path: Path) -> None:
    writer = start_writer(tmp_path / "model.gguf", BASE | CASES["llama"])
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(64, np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"has no tensor token_embd\.weight"):
        read_gguf(tmp_path / "model.gguf")


def finish_header(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def test_types_that_cannot_be_dequantised_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("matrix", np.zeros((2, 292), np.uint8), raw_dtype=Q.Q8_K)
    finish(writer)
    with pytest.raises(CheckpointError, match="matrix is stored as Q8_K, which cannot be dequantised"):
        read_gguf_file(tmp_path / "model.gguf")


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(1)
    finish_header(writer)
    with pytest.raises(CheckpointError, match="big-endian"):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut short"),
        (b"PK\x03\x04 something else", "no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), r"GGUF version 1; versions \(2, 3\) can be read"),
        (b"GGUF" + struct.pack("<I", 4) + bytes(64), "GGUF version 4"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 77), "type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"\xff", 4), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 999, 0), "type 999"),
    ],
)
def test_damaged_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_gguf(tmp_path / "model.gguf")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    config = BASE | CASES["qwen2"]
    whole = write(tmp_path / "whole.gguf", config, hf_tensors(config)).read_bytes()
    path = tmp_path / "cut.gguf"
    data = whole.rindex(b"blk.1")
    for length in [*range(0, data, 97), len(whole) - 4096, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cut short"):
            read_gguf(path)


def test_alignment_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    for index in range(3):
        writer.add_tensor(f"t{index}", np.full((2, 3), index, np.float32))
    finish(writer)
    for index in range(3):
        np.testing.assert_array_equal(read_gguf_file(path).tensors[f"t{index}"].load(), np.full((2, 3), index))


def test_metadata_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 1 << 31)
    writer.add_int32("i32", -5)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("f32", 1e-6)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "Tiếng Việt 🙂")
    writer.add_array("texts", ["a", "", "ộ"])
    writer.add_array("numbers", [3, -4])
    finish_header(writer)
    assert read_gguf_file(path).metadata == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 1 << 31,
        "i32": -5,
        "u64": 1 << 63,
        "i64": -(1 << 62),
        "f32": 1e-6,
        "f64": 0.1,
        "yes": True,
        "text": "Tiếng Việt 🙂",
        "texts": ["a", "", "ộ"],
        "numbers": [3, -4],
    }


@pytest.mark.slow
def test_smollm2_reads_as_the_gguf_package_reads_it(smollm2_gguf: Path) -> None:
    target = read_gguf(smollm2_gguf)
    backbone = target.backbone
    assert (target.family, target.vocabulary_size, target.context_length) == ("llama", 49152, 8192)
    assert (backbone.hidden_size, backbone.intermediate_size, backbone.norm_epsilon) == (576, 1536, 1e-5)
    assert (backbone.head_count, backbone.kv_head_count, backbone.head_dim, len(backbone.layers)) == (9, 3, 64, 30)
    assert target.stop_token_ids == (0, 2)  # <|endoftext|> and <|im_end|>
    assert "lm_head.weight" not in target.tensors
    reader = gguf.GGUFReader(smollm2_gguf)
    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, module, head_count in (
        ("token_embd", "embed_tokens", None),
        ("blk.29.ffn_down", "layers.29.mlp.down_proj", None),
        ("blk.7.attn_q", "layers.7.self_attn.q_proj", 9),
        ("blk.7.attn_k", "layers.7.self_attn.k_proj", 3),
    ):
        values = target.tensors[f"{module}.weight"].load()
        if head_count:
            values = interleaved(values, head_count)
        np.testing.assert_array_equal(values, stored[f"{name}.weight"])
    assert math.prod(reader.tensors[0].shape) == target.tensors["embed_tokens.weight"].load().size


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_weights(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    config = BASE | {"model_type": family}
    path = write(tmp_path / "model.gguf", config, hf_tensors(config), Q.Q8_0)
    fields = {key: value for key, value in config.items() if key != "rope_theta"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
    loaded = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    target = read_gguf(path)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert loaded["config"][key] == pytest.approx(config[key])
    expected = {name.removeprefix("model."): values.numpy() for name, values in loaded["tensors"].items()}
    assert set(target.tensors) == set(expected)
    for name, tensor in target.tensors.items():
        np.testing.assert_array_equal(tensor.load(), expected[name], err_msg=name)
