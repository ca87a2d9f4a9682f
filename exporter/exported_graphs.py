"""Runs the graphs of a bundle for one request, as docs/reference/graphs.md describes their inputs and outputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dspark.exporter.errors import ParityError
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.contract import (
    CHOICES,
    FEATURE,
    LOGIT_SUMS,
    MASKED,
    WRITE_INDEX,
    cache_names,
    context_names,
    delta_names,
    present_context_names,
    present_names,
)
from dspark.runtime.bundle.manifest import CacheInfo, DrafterInfo

__all__ = ["Arrays", "ExportedGraphs"]

Arrays: TypeAlias = dict[str, NDArray[Any]]
"""Graph inputs or outputs by name."""
LayerNames: TypeAlias = Callable[[int], Sequence[str]]


@dataclass(frozen=True)
class _Cache:
    """Keys or values of a layer: the graph's input, its output that extends them, and their shape."""

    past: str
    extended: str
    info: CacheInfo


class ExportedGraphs:
    """The graphs of a bundle in ONNX Runtime's CPU provider.

    Texts of two tokens and more are computed in two pieces, the second over the cached rows of the first.

    Args:
        bundle: The bundle.

    Raises:
        ParityError: ONNX Runtime cannot load a graph, or later cannot run it.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._manifest = bundle.manifest
        self._sessions = {
            name: _open(name, bundle.file(file))
            for name, file in bundle.manifest.graphs.model_dump(exclude_none=True).items()
        }

    def target(self, ids: NDArray[np.int64]) -> Arrays:
        """Runs the target over a text ``[n]``.

        Returns:
            ``logits [n, V]``, and for a drafter ``context.{j}.{key,value} [1, Hkv, n, D]`` or ``feature [n, H]``.
        """
        info = self._manifest.target

        def feeds(start: int, stop: int) -> Arrays:
            index = np.arange(stop - start)
            inputs = {
                "input_ids": ids[start:stop],
                "position_ids": np.arange(start, stop),
                "pad_index": index[None],
                "unpad_index": index,
                "logits_index": index,
            }
            if info.rope_lengths:
                inputs["rope_lengths"] = np.full(stop - start, len(ids))
            return inputs

        in_place = self._manifest.cache_form == "in-place"
        caches = _caches(info.cache, cache_names, present_names if in_place else delta_names)
        context: list[_Cache] = []
        if in_place and self._manifest.drafter is not None and self._manifest.drafter.kind != "eagle3":
            context = _caches(self._manifest.drafter.cache, context_names, present_context_names)
        pieces, cached = self._in_two_pieces("target", len(ids), [*caches, *context], feeds, in_place=in_place)
        # Rows of draft layers are [1, Hkv, T, D]; everything else has one row per token.
        joined = {
            name: np.concatenate([piece[name] for piece in pieces], axis=2 if first.ndim == 4 else 0)
            for name, first in pieces[0].items()
            if name not in (CHOICES, LOGIT_SUMS)  # these follow from the logits
        }
        return joined | {cache.past: cached[cache.past] for cache in context}

    def block(self, context: Arrays, anchor: int) -> Arrays:
        """Runs a block drafter after its context: ``hidden [1, γ, H]`` and ``base_logits [1, γ, V']``."""
        length = context[context_names(0)[0]].shape[2]
        inputs = {
            "anchor_ids": np.array([anchor]),
            "anchor_positions": np.array([length]),
            "context_bias": np.zeros((1, 1, 1, 1, length), np.float32),
        }
        return self._run("drafter", {**inputs, **context})

    def head(self, block: Arrays, anchor: int) -> Arrays:
        """Runs the head, greedily: ``tokens [1, γ]``, ``draft_logits [1, γ, V']`` and perhaps ``confidence [1, γ]``."""
        return self._run("head", {**block, "anchor_ids": np.array([anchor]), **self._greedy()})

    def eagle3(self, context: Arrays, following: NDArray[np.int64]) -> Arrays:
        """Runs an EAGLE-3 drafter, greedily, after n features and the tokens ``[n]`` that follow each.

        Returns:
            ``tokens [1, γ]`` and ``draft_logits [1, γ, V']``.
        """

        def feeds(start: int, stop: int) -> Arrays:
            return {
                "input_ids": following[None, start:stop],
                "features": context[FEATURE][None, start:stop],
                "position_ids": np.arange(start, stop)[None],
                "last_index": np.array([stop - start - 1]),
                **self._greedy(),
            }

        caches = _caches(self._drafter.cache, context_names, delta_names)
        pieces, _ = self._in_two_pieces("drafter", len(following), caches, feeds, in_place=False)
        return pieces[-1]

    @property
    def _drafter(self) -> DrafterInfo:
        assert self._manifest.drafter is not None
        return self._manifest.drafter

    def _greedy(self) -> Arrays:
        return {
            "uniform": np.zeros((1, self._drafter.draft_length), np.float32),
            "temperature": np.zeros(1, np.float32),
        }

    def _in_two_pieces(
        self, graph: str, length: int, caches: Sequence[_Cache], feeds: Callable[[int, int], Arrays], *, in_place: bool
    ) -> tuple[list[Arrays], Arrays]:
        """Runs a graph that extends its cache.

        Args:
            graph: Its name.
            length: Tokens of the text, and room of the cache.
            caches: Its cached keys and values.
            feeds: The other inputs for tokens ``start … stop − 1``, without the attention bias.
            in_place: Whether it writes new rows into the cache, instead of returning them.

        Returns:
            What each piece returned besides its new rows, and the cache at the end.
        """
        cached = {
            cache.past: np.zeros((1, cache.info.kv_heads, length, cache.info.head_dim), np.float32) for cache in caches
        }
        pieces = []
        for start, stop in pairwise(sorted({0, length // 2, length})):
            inputs = {**feeds(start, stop), **cached}
            if in_place:
                inputs[WRITE_INDEX] = np.array([start])
            bias = _seen(start, stop, length) if in_place else _seen_before_and_among(start, stop, length)
            outputs = self._run(graph, {**inputs, "attention_bias": np.where(bias, np.float32(0), np.float32(MASKED))})
            for cache in caches:
                rows = outputs.pop(cache.extended)
                if in_place:
                    cached[cache.past] = rows
                else:
                    cached[cache.past][:, :, start:stop] = rows
            pieces.append(outputs)
        return pieces, cached

    def _run(self, graph: str, inputs: Arrays) -> Arrays:
        session = self._sessions[graph]
        names = [output.name for output in session.get_outputs()]
        with _explained(graph):
            return dict(zip(names, session.run(names, inputs), strict=True))


def _open(graph: str, file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    with _explained(graph):
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


@contextmanager
def _explained(graph: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the binding raises its own classes, which share no public base
        raise ParityError(f"ONNX Runtime cannot run the {graph} graph: {error}") from error


def _seen(start: int, stop: int, capacity: int) -> NDArray[np.bool_]:
    """Which of S rows tokens ``start … stop − 1`` see, their own among them: ``[1, 1, 1, T, S]``."""
    return (np.arange(capacity) <= np.arange(start, stop)[:, None])[None, None, None]


def _seen_before_and_among(start: int, stop: int, capacity: int) -> NDArray[np.bool_]:
    """Which of S rows before them and of each other tokens ``start … stop − 1`` see: ``[1, 1, 1, T, S + T]``."""
    rows, new = np.arange(capacity), np.arange(start, stop)
    past_seen = np.broadcast_to(rows < start, (len(new), capacity))
    return np.concatenate([past_seen, new <= new[:, None]], axis=1)[None, None, None]


def _caches(info: CacheInfo, past_names: LayerNames, extended_names: LayerNames) -> list[_Cache]:
    return [
        _Cache(past, extended, info)
        for layer in range(info.layers)
        for past, extended in zip(past_names(layer), extended_names(layer), strict=True)
    ]
