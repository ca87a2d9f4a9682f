"""Targets in GGUF files.

llama.cpp's own names and conventions are undone here. The result is the Hugging Face config and tensors that the file
was converted from. Which keys and tensors an architecture has: ggml-org/ggml, ``docs/gguf.md``; what its converter
does to them: ggml-org/llama.cpp, ``conversion``.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.exporter.checkpoints.description import Target
from dspark.exporter.checkpoints.gguf_file import GgufFile, read_gguf_file
from dspark.exporter.checkpoints.gguf_tokenizer import stop_token_ids, text_assets
from dspark.exporter.checkpoints.target import target_from_config
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.errors import CheckpointError

__all__ = ["read_gguf"]

ARCHITECTURES = ("llama", "qwen2", "qwen3")

MODEL_TENSORS = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

YARN: dict[str, tuple[str, type[int] | type[float]]] = {
    "original_context_length": ("original_max_position_embeddings", int),
    "yarn_attn_factor": ("attention_factor", float),
    "yarn_beta_fast": ("beta_fast", float),
    "yarn_beta_slow": ("beta_slow", float),
}

FREQUENCY_DIVISORS = "rope_freqs.weight"

# Keys that change what is computed in a way that no supported family has, and the values that change nothing.
UNSUPPORTED = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.scale": 0,
    "attention.sliding_window_pattern": None,
    "attn_logit_softcapping": 0,
    "embedding_scale": 1,
    "expert_count": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}


def read_gguf(path: Path) -> Target:
    """Reads a target model, its tokenizer and its chat template from a GGUF file.

    Args:
        path: A file of llama.cpp's architecture ``llama`` (Llama, Mistral, SmolLM2, …), ``qwen2`` or ``qwen3``.

    Returns:
        The target. Weights stay on disk and are dequantised when their rows are read.

    Raises:
        CheckpointError: If the file is damaged, a part of a split model, or holds anything but such a model.
    """
    file = read_gguf_file(path)
    architecture = _architecture(file)
    config = _config(file, architecture)
    tensors = _tensors(file, architecture, config["head_dim"])
    target = target_from_config(config, {}, tensors, text_assets(file.metadata), path.stem, (path,))
    if FREQUENCY_DIVISORS in file.tensors:
        target = _with_divided_frequencies(target, file.tensors[FREQUENCY_DIVISORS])
    return target


def _architecture(file: GgufFile) -> str:
    kind = file.metadata.find(str, "general.type", "model")
    if kind != "model":
        help_ = "; merge it into its base first (llama-export-lora)" if kind == "adapter" else ""
        raise CheckpointError(f"{file.path} holds no model but an {kind!r} file (general.type){help_}.")
    architecture = file.metadata.find(str, "general.architecture", "")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} has the architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)}."
        )
    parts = file.metadata.find(int, "split.count", 1)
    if parts > 1:
        raise CheckpointError(f"{file.path} is one of {parts} parts; join them first with llama-gguf-split --merge.")
    for key, neutral in UNSUPPORTED.items():
        value = file.metadata.get(f"{architecture}.{key}", neutral)
        if value != neutral:
            raise CheckpointError(f"{file.path}: {architecture}.{key} = {value!r} is not supported.")
    return architecture


def _config(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The values as ``config.json`` of the same model has them."""
    metadata = file.metadata
    layer_count = _integer(file, f"{architecture}.block_count")
    if layer_count > len(file.tensors):
        raise CheckpointError(f"{file.path}: {layer_count} layers cannot be made of {len(file.tensors)} tensors.")
    hidden_size = _integer(file, f"{architecture}.embedding_length")
    head_count = _integer(file, f"{architecture}.attention.head_count")
    head_dim = _integer(file, f"{architecture}.attention.key_length", hidden_size // head_count)
    if _integer(file, f"{architecture}.attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: keys and values of different lengths are not supported.")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight.")
    vocabulary_size = file.tensors["token_embd.weight"].shape[0]
    token_count = len(metadata.find_all(str, "tokenizer.ggml.tokens"))
    if token_count > vocabulary_size:
        raise CheckpointError(f"{file.path} has {token_count} tokens, but embeddings for {vocabulary_size}.")
    config: dict[str, Any] = {
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _integer(file, f"{architecture}.feed_forward_length"),
        "num_hidden_layers": layer_count,
        "num_attention_heads": head_count,
        "num_key_value_heads": _integer(file, f"{architecture}.attention.head_count_kv", head_count),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.require_uniform(float, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _integer(file, f"{architecture}.context_length"),
        "vocab_size": vocabulary_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "rope_parameters": _rope_parameters(file, architecture, head_dim),
        "eos_token_id": stop_token_ids(metadata),
    }
    window = metadata.require_uniform(int, f"{architecture}.attention.sliding_window", 0)
    if window:
        config |= {
            "model_type": "mistral" if architecture == "llama" else architecture,
            "use_sliding_window": True,
            "sliding_window": window,
            "layer_types": ["sliding_attention"] * layer_count,
        }
    return config


def _rope_parameters(file: GgufFile, architecture: str, head_dim: int) -> dict[str, Any]:
    metadata, prefix = file.metadata, f"{architecture}.rope"
    rotary_dim = _integer(file, f"{prefix}.dimension_count", head_dim)
    if rotary_dim != head_dim and architecture == "llama":
        raise CheckpointError(f"{file.path}: {prefix}.dimension_count is {rotary_dim} of {head_dim}; all must rotate.")
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.require_uniform(float, f"{prefix}.freq_base", 10000.0),
        "partial_rotary_factor": rotary_dim / head_dim,
    }
    scaling = metadata.find(str, f"{prefix}.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{file.path}: {prefix}.scaling.type is {scaling!r}; supported are none, linear and yarn."
        )
    older = metadata.require_uniform(float, f"{prefix}.scale_linear", 1.0)
    factor = metadata.require_uniform(float, f"{prefix}.scaling.factor", older)
    if scaling == "none" or factor in (0.0, 1.0):
        return parameters
    parameters |= {"rope_type": scaling, "factor": factor}
    if scaling == "yarn":
        found = {name: metadata.find(kind, f"{prefix}.scaling.{key}") for key, (name, kind) in YARN.items()}
        parameters |= {name: value for name, value in found.items() if value is not None}
    return parameters


def _tensors(file: GgufFile, architecture: str, head_dim: int) -> Mapping[str, LazyTensor]:
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in file.tensors.items():
        if name == FREQUENCY_DIVISORS or name.endswith("attn_rot_embd.weight"):
            continue  # rotation tables, no weights
        module = _module(name)
        if module is None:
            raise CheckpointError(f"{file.path} has the tensor {name}, which the architecture {architecture} has not.")
        interleaved = architecture == "llama" and re.search(r"\.[qk]_proj\.", module)
        tensors[module] = HalfSplitHeads(tensor, head_dim) if interleaved else tensor
    return tensors


def _module(name: str) -> str | None:
    """The name without ``model.`` that Hugging Face has for a tensor of llama.cpp."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return None
    layer, module, kind = match.groups()
    if layer is None:
        return f"{MODEL_TENSORS[module]}.{kind}" if module in MODEL_TENSORS else None
    return f"layers.{layer}.{LAYER_TENSORS[module]}.{kind}" if module in LAYER_TENSORS else None


class HalfSplitHeads(LazyTensor):
    """Q or K projection whose heads rotate dimension j with j + head_dim/2, from one that rotates 2j with 2j + 1.

    llama.cpp's converter interleaves the rows of the architecture ``llama``; this puts them back.

    Args:
        source: The weight ``[heads · head_dim, hidden]`` or bias ``[heads · head_dim]`` in llama.cpp's order.
        head_dim: Rows of a head.
    """

    def __init__(self, source: LazyTensor, head_dim: int) -> None:
        self.name = source.name
        self.shape = source.shape
        self._source = source
        self._head_dim = head_dim

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start … stop − 1`` in Hugging Face's order; whole heads are read for them."""
        first = start // self._head_dim * self._head_dim
        last = -(-stop // self._head_dim) * self._head_dim
        heads = self._source.rows(first, last)
        pairs = heads.reshape(-1, self._head_dim // 2, 2, *heads.shape[1:])
        return pairs.swapaxes(1, 2).reshape(heads.shape)[start - first : stop - first]


def _with_divided_frequencies(target: Target, divisors: LazyTensor) -> Target:
    """Llama 3's scaling, which the converter has worked out into one divisor for each rotated pair."""
    rope = target.backbone.rope
    frequencies = np.array(rope.inverse_frequencies, np.float32)
    if divisors.shape != frequencies.shape:
        raise CheckpointError(f"{divisors.name} has the shape {divisors.shape}; {frequencies.shape} is needed.")
    divided = tuple((frequencies / divisors.load()).tolist())
    return replace(target, backbone=replace(target.backbone, rope=replace(rope, inverse_frequencies=divided)))


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.require_uniform(int, key, default)
    if value < 1:
        raise CheckpointError(f"{file.path}: {key} is {value!r}; a positive whole number is needed.")
    return value
