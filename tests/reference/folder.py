"""Checkpoint folders: configurations with their class defaults, and tensors."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (lets safetensors hand out bfloat16)
from numpy.typing import NDArray
from safetensors.numpy import load_file

__all__ = ["read_config", "read_tensors", "with_class_defaults"]

# What the configuration classes of transformers assume when a key is missing.
_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_QWEN2: dict[str, Any] = _COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def with_class_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A backbone configuration in which nothing is left to the class of its ``model_type``."""
    full = CLASS_DEFAULTS[config["model_type"]] | config
    if full["hidden_act"] != "silu":
        raise ValueError(f"hidden_act {full['hidden_act']!r} is not one of the families here")
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = full["num_attention_heads"]
    if full.get("head_dim") is None:
        full["head_dim"] = full["hidden_size"] // full["num_attention_heads"]
    return full


def read_tensors(folder: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a single or sharded checkpoint: floats as float64, integers and booleans as they are."""
    tensors: dict[str, NDArray[Any]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    floats = {name: tensor.astype("float64") for name, tensor in tensors.items() if tensor.dtype.kind not in "iub"}
    return tensors | floats
