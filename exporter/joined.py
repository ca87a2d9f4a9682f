"""Projections of the same input joined to one: fewer and larger products, in graphs that count every node's cost.

An MLP's gate and up projections are joined, and attention's: in a target all three, in a drafter keys and values alone,
as these come from two places (its own block, and the target's taps) and are stored once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.checkpoints.tensors import LazyTensor

__all__ = ["join_projections"]

GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
JOINED: Mapping[type, Mapping[str, Sequence[str]]] = {
    Target: {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), **GATE_UP},
    Drafter: {"self_attn.kv_proj": ("self_attn.k_proj", "self_attn.v_proj"), **GATE_UP},
}
Model = TypeVar("Model", Target, Drafter)


def join_projections(model: Model) -> Model:
    """The same model with joined tensors in place of their parts."""
    tensors = dict(model.tensors)
    for layer in range(len(model.backbone.layers)):
        for joined, parts in JOINED[type(model)].items():
            for kind in ("weight", "bias"):
                names = [f"layers.{layer}.{part}.{kind}" for part in parts]
                if names[0] in tensors:  # biases come for all of them or for none
                    tensors[f"layers.{layer}.{joined}.{kind}"] = _JoinedRows([tensors.pop(name) for name in names])
    return replace(model, tensors=tensors)


class _JoinedRows(LazyTensor):
    """Tensors of the same width, one after the other."""

    def __init__(self, parts: Sequence[LazyTensor]) -> None:
        first = parts[0]
        self.name = " and ".join(part.name for part in parts)
        self.shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        self._parts = parts

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Reads each part's share."""
        pieces = []
        for part in self._parts:
            count = part.shape[0]
            if start < count and stop > 0:
                pieces.append(part.rows(max(start, 0), min(stop, count)))
            start, stop = start - count, stop - count
        return np.concatenate(pieces)
