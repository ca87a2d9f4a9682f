"""Targets as Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from .weights import Weights, override, write_folder

__all__ = ["write_target"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False, "head_dim": 8},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "head_dim": 8},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": None},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "head_dim": 16,
    },
}


def write_target(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    generation_config: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a target.

    Args:
        family: ``llama``, ``mistral``, ``qwen2`` or ``qwen3``.
        generation_config: Content of ``generation_config.json``; None writes no such file.
        changes: Keys of ``config.json``; OMIT leaves one out. With ``rope_theta`` or ``rope_scaling`` among them the
            file has the spelling of transformers 4.
    """
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": changes.get("vocab_size", 96) - 2,
        "dtype": dtype,
        **FAMILIES[family],
    }
    if not {"rope_theta", "rope_scaling"} & set(changes):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    config = override(config, changes)
    shape = config | {"head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}
    weights, vocabulary = Weights(seed), config["vocab_size"]
    biases = "qkv" if family == "qwen2" else "qkvo" * bool(config.get("attention_bias"))
    biases += "m" * bool(config.get("mlp_bias"))

    embedding = weights.random.standard_normal((vocabulary, config["hidden_size"]))
    embedding[:, 0] = 1.5
    head = np.roll(embedding, 7, axis=0)
    head[:, 0] = 0
    embedding[-1] *= 0.1
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": weights.vector(config["hidden_size"], 1.0)}
    gain = 1 / np.sqrt(config["num_hidden_layers"])
    for layer in range(config["num_hidden_layers"]):
        tensors |= weights.layer(f"model.layers.{layer}", shape, gain, biases, qk_norm=family == "qwen3")
    if config["tie_word_embeddings"]:
        embedding *= 0.5
    else:
        head[-2:] = head[6] = 0  # neither stop nor mask, nor what would follow the mask
        tensors["lm_head.weight"] = head
    write_folder(folder, config, tensors, dtype, shards)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2))
    return folder
