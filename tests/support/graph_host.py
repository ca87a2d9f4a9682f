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
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # a cache that is not written in place is copied, and warned of
    if b"QGemm" in (bundle / f"{name}.onnx").read_bytes():  # exact products on processors without VNNI, too
        options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(str(bundle / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])


class Host:
    """Runs a target's graph."""

    def __init__(self, bundle: Path) -> None:
        manifest = Bundle.open(bundle).manifest
        self.info, self._drafter = manifest.target, manifest.drafter
        self.in_place = manifest.cache_form == "in-place"
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
        if self.in_place:
            room += width
        past = np.full((cache.layers, 2, batch, cache.kv_heads, room, cache.head_dim), JUNK, np.float32)
        bias = np.full((batch, 1, 1, width, room if self.in_place else room + width), MASKED, np.float32)
        pad, unpad, ids, positions = np.zeros((batch, width), np.int64), [], [], []
        for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
            length = request.length
            past[:, :, index, :, :length] = request.rows
            pad[index, :count] = len(ids) + np.arange(count)  # padding repeats the first flat token
            unpad += [index * width + token for token in range(count)]
            ids += request.tokens[length : length + count]
            positions += range(length, length + count)
            bias[index, ..., :length] = 0
            start = length if self.in_place else room
            bias[index, ..., start : start + width] = np.triu(np.full((width, width), MASKED), 1)
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
        lengths = [request.length for request in requests]
        if self.in_place:
            feeds["write_index"] = np.array(lengths)
            if self._drafter is not None and self._drafter.kind != "eagle3":
                info = self._drafter.cache
                junk = np.full((batch, info.kv_heads, room, info.head_dim), JUNK, np.float32)
                feeds |= {f"context.{layer}.{part}": junk for layer in range(info.layers) for part in ("key", "value")}
        names = [output.name for output in self.session.get_outputs()]
        values = dict(zip(names, self.session.run(names, feeds), strict=True))

        if self.in_place:
            assert np.array_equal(values["choices"], values["logits"].argmax(axis=1))
            assert np.allclose(values["logit_sums"], values["logits"].sum(axis=1), atol=1e-3)

        def new(name: str, index: int) -> Array:
            """The rows ``[Hkv, n, D]`` that the graph computed for a request; those before must be as they were."""
            rows: Array = values[f"present.{name}" if self.in_place else name][index]
            if not self.in_place:
                return rows[:, : counts[index]]
            before = feeds[name if name.startswith("context") else f"past.{name}"][index]
            start, end = lengths[index], lengths[index] + counts[index]
            assert np.array_equal(rows[:, :start], before[:, :start])
            assert np.array_equal(rows[:, start + width :], before[:, start + width :])
            return rows[:, start:end]

        prefix = "" if self.in_place else "new."
        for index, request in enumerate(requests):
            layers = [
                [new(f"{prefix}{layer}.{part}", index) for part in ("key", "value")] for layer in range(cache.layers)
            ]
            if commit:
                request.rows = np.concatenate([request.rows, np.array(layers)], axis=3)
        splits = np.cumsum(counts)[:-1]
        logits = np.split(values["logits"], splits)
        if "feature" in values:
            return logits, np.split(values["feature"], splits)
        context = sorted(name.removeprefix("present.") for name in names if "context." in name)
        return logits, [np.array([new(name, index) for name in context]) for index in range(batch)]
