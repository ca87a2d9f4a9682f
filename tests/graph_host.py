"""The smallest host of a target's graph, written after the graph's contract alone: no part of the runtime runs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dspark.runtime import Bundle

__all__ = ["MASKED", "Host", "Request", "open_graph"]

Array = NDArray[Any]

MASKED = -30000.0
JUNK = 50.0  # what lies in cache rows that must not be seen


@dataclass
class Request:
    """A text and the cache rows of its first tokens, ``[layers, 2, Hkv, n, D]``."""

    tokens: Sequence[int]
    rows: Array

    @property
    def length(self) -> int:
        return int(self.rows.shape[3])


def open_graph(bundle: Path, name: str) -> onnxruntime.InferenceSession:
    """A graph of a bundle on the CPU provider."""
    return onnxruntime.InferenceSession(str(bundle / f"{name}.onnx"), providers=["CPUExecutionProvider"])


class Host:
    """Runs a target's graph."""

    def __init__(self, bundle: Path) -> None:
        self.info = Bundle.open(bundle).manifest.target
        self.session = open_graph(bundle, "target")

    def request(self, tokens: Sequence[int]) -> Request:
        cache = self.info.cache
        return Request(tokens, np.zeros((cache.layers, 2, cache.kv_heads, 0, cache.head_dim), np.float32))

    def step(
        self, requests: Sequence[Request], counts: Sequence[int], spare: int = 0, commit: bool = True
    ) -> tuple[list[Array], list[Array]]:
        """Computes the next tokens of each request in one pass.

        Args:
            counts: How many of each.
            spare: Cache rows of junk, masked, beyond the longest request's.
            commit: Whether the requests keep the new rows.

        Returns:
            For each request the logits ``[n, V]``, and the draft context or feature rows ``[…, n, …]`` side by side.
        """
        cache, batch = self.info.cache, len(requests)
        room, width = max(request.length for request in requests) + spare, max(counts)
        past = np.full((cache.layers, 2, batch, cache.kv_heads, room, cache.head_dim), JUNK, np.float32)
        bias = np.full((batch, 1, 1, width, room + width), MASKED, np.float32)
        pad, unpad, ids, positions = np.zeros((batch, width), np.int64), [], [], []
        for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
            length = request.length
            past[:, :, index, :, :length] = request.rows
            pad[index, :count] = len(ids) + np.arange(count)  # padding repeats the first flat token
            unpad += [index * width + token for token in range(count)]
            ids += request.tokens[length : length + count]
            positions += range(length, length + count)
            bias[index, ..., :length] = 0
            bias[index, ..., room:] = np.triu(np.full((width, width), MASKED), 1)
        feeds: dict[str, Array] = {
            "input_ids": np.array(ids),
            "position_ids": np.array(positions),
            "pad_index": pad,
            "unpad_index": np.array(unpad),
            "attention_bias": bias,
            "logits_index": np.arange(len(ids)),
        }
        for layer in range(cache.layers):
            feeds |= {f"past.{layer}.key": past[layer, 0], f"past.{layer}.value": past[layer, 1]}
        names = [output.name for output in self.session.get_outputs()]
        values = dict(zip(names, self.session.run(names, feeds), strict=True))
        new = np.array([[values[f"new.{layer}.{part}"] for part in ("key", "value")] for layer in range(cache.layers)])
        logits = np.split(values["logits"], np.cumsum(counts)[:-1])
        extra = self._extra(values, counts)
        for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
            if commit:
                request.rows = np.concatenate([request.rows, new[:, :, index, :, :count]], axis=3)
        return logits, extra

    @staticmethod
    def _extra(values: dict[str, Array], counts: Sequence[int]) -> list[Array]:
        if "feature" in values:
            return np.split(values["feature"], np.cumsum(counts)[:-1])
        context = [value for name, value in sorted(values.items()) if name.startswith("context.")]
        return [np.array([rows[index, :, :count] for rows in context]) for index, count in enumerate(counts)]
