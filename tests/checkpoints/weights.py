"""Random weights, and how folders are written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

__all__ = ["OMIT", "Weights", "edit", "override", "write_folder"]

OMIT: Any = object()  # as the value of an override: leave the key out

Tensors = dict[str, NDArray[Any]]


class Weights:
    """A seeded source of weights whose outputs have about the size of their inputs, times a gain."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> NDArray[Any]:
        return self.random.normal(scale=gain / np.sqrt(columns), size=(rows, columns))

    def vector(self, size: int, mean: float = 0.0) -> NDArray[Any]:
        return self.random.normal(mean, 0.1, size)

    def layer(
        self, name: str, config: Mapping[str, Any], gain: float, biases: str = "", qk_norm: bool = False, wide: int = 1
    ) -> Tensors:
        """A decoder layer.

        Args:
            biases: Projections with a bias, by letter: q, k, v, o, and m for the whole MLP.
            wide: 2 for EAGLE-3's first layer, which attends with embedding and hidden state side by side.
        """
        hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
        shapes = {
            "self_attn.q_proj": (query, wide * hidden, 2.0),
            "self_attn.k_proj": (key, wide * hidden, 2.0),
            "self_attn.v_proj": (key, wide * hidden, 1.0),
            "self_attn.o_proj": (hidden, query, gain),
            "mlp.gate_proj": (inner, hidden, 2.0),
            "mlp.up_proj": (inner, hidden, 1.0),
            "mlp.down_proj": (hidden, inner, gain),
        }
        tensors = {f"{name}.{part}.weight": self.matrix(*shape) for part, shape in shapes.items()}
        for part, (rows, _, _) in shapes.items():
            if part.removeprefix("self_attn.")[0] in biases or (part.startswith("mlp") and "m" in biases):
                tensors[f"{name}.{part}.bias"] = 3 * self.vector(rows)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = self.vector(hidden, mean=1.0)
        for which in "qk" if qk_norm else "":
            tensors[f"{name}.self_attn.{which}_norm.weight"] = self.vector(dim, mean=1.0)
        return tensors

    def copy_neighbours(self, tensors: Tensors, name: str, config: Mapping[str, Any]) -> None:
        """Change a layer so that its attention adds the normed embeddings of the nearest positions.

        Embeddings have the same value in dimension 0: queries and keys that read it alone agree most where RoPE has
        turned them alike.
        """
        dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
        hidden = config["hidden_size"]
        attention = f"{name}.self_attn"
        for which in "qkv":
            tensors[f"{attention}.{which}_proj.weight"] *= 0.3
        for which in "qk":
            tensors[f"{attention}.{which}_proj.weight"][:, 0] += 2.0
        if f"{attention}.q_norm.weight" in tensors:
            tensors[f"{attention}.q_norm.weight"] *= 3.0
        tall = np.linalg.qr(self.random.standard_normal(sorted((kv_heads * dim, hidden), reverse=True)))[0]
        basis = tall if kv_heads * dim >= hidden else tall.T  # [kv, H]
        tensors[f"{attention}.v_proj.weight"][:, :hidden] = basis
        back = np.repeat(basis.T.reshape(hidden, kv_heads, dim), heads // kv_heads, axis=1)
        tensors[f"{attention}.o_proj.weight"] += 2 * back.reshape(hidden, heads * dim) * kv_heads / heads


def override(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with changed, new and omitted keys."""
    return {key: value for key, value in (config | dict(changes)).items() if value is not OMIT}


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors, dtype: str, shards: int = 1) -> Path:
    """Write ``config.json`` and the tensors, floats as ``dtype`` (float32, float16, bfloat16), in so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    stored = {
        name: np.ascontiguousarray(tensor.astype(kind) if tensor.dtype.kind == "f" else tensor)
        for name, tensor in tensors.items()
    }
    names = sorted(stored)
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: stored[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any], dict[str, NDArray[Any]]], None]) -> Path:
    """Changes a checkpoint's configuration and tensors in place."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
