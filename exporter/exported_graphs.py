"""Runs the graphs of a bundle for one request, the way ARCHITECTURE.md describes their inputs and outputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dspark.exporter.errors import ParityError
from dspark.runtime.bundle import Bundle, CacheInfo, DrafterInfo
from dspark.runtime.contract import FEATURE, MASKED, cache_names, context_names, delta_names

__all__ = ["Arrays", "ExportedGraphs"]

Arrays: TypeAlias = dict[str, NDArray[Any]]
"""Graph inputs or outputs by name."""


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

        pieces = self._in_two_pieces("target", len(ids), info.cache, cache_names, feeds)
        # Rows of draft layers are [1, Hkv, T, D]; everything else has one row a token.
        return {
            name: np.concatenate([piece[name] for piece in pieces], axis=2 if first.ndim == 4 else 0)
            for name, first in pieces[0].items()
        }

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

        return self._in_two_pieces("drafter", len(following), self._drafter.cache, context_names, feeds)[-1]

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
        self,
        graph: str,
        length: int,
        info: CacheInfo,
        past_names: Callable[[int], Sequence[str]],
        feeds: Callable[[int, int], Arrays],
    ) -> list[Arrays]:
        """Runs a graph that extends its cache.

        Args:
            graph: Its name.
            length: Tokens of the text, and room of the cache.
            info: The cache's shape.
            past_names: Names of a layer's cached keys and values.
            feeds: The other inputs for tokens ``start … stop − 1``, without the attention bias.

        Returns:
            What each piece returned besides its new rows.
        """
        shape = (1, info.kv_heads, length, info.head_dim)
        pairs = [
            pair for layer in range(info.layers) for pair in zip(past_names(layer), delta_names(layer), strict=True)
        ]
        past = {name: np.zeros(shape, np.float32) for name, _ in pairs}
        pieces = []
        for start, stop in pairwise(sorted({0, length // 2, length})):
            bias = _causal_bias(start, stop, length)
            outputs = self._run(graph, {**feeds(start, stop), **past, "attention_bias": bias})
            for name, delta in pairs:
                past[name][:, :, start:stop] = outputs.pop(delta)
            pieces.append(outputs)
        return pieces

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


def _causal_bias(start: int, stop: int, capacity: int) -> NDArray[np.float32]:
    """Bias ``[1, 1, 1, T, S + T]`` for tokens ``start … stop − 1`` over a cache of S rows that holds those before."""
    rows, new = np.arange(capacity), np.arange(start, stop)
    past_seen = np.broadcast_to(rows < start, (len(new), capacity))
    seen = np.concatenate([past_seen, new <= new[:, None]], axis=1)
    return np.where(seen, np.float32(0), np.float32(MASKED))[None, None, None]
