"""The pieces that targets and drafters share."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tensors = Mapping[str, NDArray[Any]]

__all__ = ["Array", "Tensors", "attention", "heads", "linear", "mlp", "rms_norm", "sigmoid"]


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    scale: Array = weight / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)
    return x * scale


def linear(x: Array, tensors: Tensors, name: str) -> Array:
    """``x · Wᵀ``, plus the bias if the checkpoint has one."""
    y: Array = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def heads(x: Array, tensors: Tensors, attention_name: str, which: str, dim: int, epsilon: float) -> Array:
    """Projection ``which`` (q, k, v) of ``x``, split into heads ``[n, h, D]``, through its norm if it has one."""
    split = linear(x, tensors, f"{attention_name}.{which}_proj").reshape(len(x), -1, dim)
    norm = f"{attention_name}.{which}_norm.weight"
    return rms_norm(split, tensors[norm], epsilon) if norm in tensors else split


def attention(query: Array, key: Array, value: Array, visible: NDArray[np.bool_]) -> Array:
    """Softmax attention of ``[n, Hq, D]`` over ``[m, Hkv, D]`` where ``visible[n, m]``; returns ``[n, Hq·D]``."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (part.swapaxes(0, 1) for part in (query, key, value))
    key, value = key.repeat(group, axis=0), value.repeat(group, axis=0)
    scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = (weights @ value).swapaxes(0, 1).reshape(query.shape[1], -1)
    return mixed


def mlp(x: Array, tensors: Tensors, name: str) -> Array:
    gate = linear(x, tensors, f"{name}.gate_proj")
    return linear(gate * sigmoid(gate) * linear(x, tensors, f"{name}.up_proj"), tensors, f"{name}.down_proj")


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
