"""How a target's graph reads cached keys and values and what it leaves of the new ones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import onnx_ir as ir

from dspark.exporter.checkpoints.description import Backbone
from dspark.exporter.graphs.builder import FLOAT, INT64, GraphBuilder
from dspark.exporter.graphs.layers import KeyValue, cached_rows, distances, part_sizes
from dspark.runtime.bundle.contract import (
    WRITE_INDEX,
    cache_names,
    context_names,
    delta_names,
    present_context_names,
    present_names,
)
from dspark.runtime.bundle.manifest import CacheForm

__all__ = ["CACHES", "TargetCache"]


class TargetCache(ABC):
    """The cache of one graph; making it declares the cached keys and values as inputs.

    Args:
        g: The graph.
        backbone: The target's sizes.
        pad_index: int64 ``[B, T]``, whose width is the number of new rows.

    Attributes:
        keys: Name of the dimension of all keys that a token may attend to.
        sizes: Sizes of their parts, as in ``attend``.
    """

    keys: str
    sizes: ir.Value | None

    def __init__(self, g: GraphBuilder, backbone: Backbone, pad_index: ir.Value) -> None:
        self._g = g
        self._backbone = backbone
        self._past = [cached_rows(g, cache_names(index), backbone) for index in range(len(backbone.layers))]

    @abstractmethod
    def distances(self, queries: ir.Value) -> ir.Value:
        """As ``layers.distances``, for all keys, of queries at positions ``[B, T]``."""

    @abstractmethod
    def extend(self, layer: int, own: KeyValue) -> list[KeyValue]:
        """Takes a layer's new rows ``[B, Hkv, T, D]``; returns all that its tokens attend to."""

    @abstractmethod
    def keep_context(self, layer: int, backbone: Backbone, own: KeyValue) -> None:
        """Takes new rows of a draft layer with the drafter's sizes."""

    def _output(self, names: tuple[str, str], rows: KeyValue, backbone: Backbone, count: str) -> None:
        for name, value in zip(names, rows, strict=True):
            self._g.output(name, value, FLOAT, "B", backbone.kv_head_count, count, backbone.head_dim)


class InPlaceCache(TargetCache):
    """New rows are written into the cache, which the host binds as input and output alike: nothing is copied.

    Every key lies at its position, whether it was drafted a moment ago or decoded long before, so sums over keys run in
    the same order and speculation changes no bit of them. The host forgets rejected rows by masking them.
    """

    keys = "S"
    sizes = None

    def __init__(self, g: GraphBuilder, backbone: Backbone, pad_index: ir.Value) -> None:
        super().__init__(g, backbone, pad_index)
        g.require_opset(24)
        self._write_index = g.input(WRITE_INDEX, INT64, "B")

    def distances(self, queries: ir.Value) -> ir.Value:
        """Keys lie at their positions."""
        return distances(self._g, queries, self._past[0][0])

    def extend(self, layer: int, own: KeyValue) -> list[KeyValue]:
        """Writes the rows; the tokens attend to the cache alone."""
        present = self._written(self._past[layer], own)
        self._output(present_names(layer), present, self._backbone, "S")
        return [present]

    def keep_context(self, layer: int, backbone: Backbone, own: KeyValue) -> None:
        """Writes the rows into the draft layers' cache, an input of its own."""
        cached = cached_rows(self._g, context_names(layer), backbone)
        self._output(present_context_names(layer), self._written(cached, own), backbone, "S")

    def _written(self, cached: KeyValue, own: KeyValue) -> KeyValue:
        key, value = (
            self._g.op("TensorScatter", rows, new, self._write_index, axis=-2)
            for rows, new in zip(cached, own, strict=True)
        )
        return key, value


class DeltaCache(TargetCache):
    """Only new rows come out, and the host appends those it keeps: devices that cannot scatter run this."""

    keys = "S+T"

    def __init__(self, g: GraphBuilder, backbone: Backbone, pad_index: ir.Value) -> None:
        super().__init__(g, backbone, pad_index)
        new = g.op("Shape", pad_index, start=1, end=2)
        self.sizes = g.op("Concat", part_sizes(g, self._past[0][0]), new, axis=0)

    def distances(self, queries: ir.Value) -> ir.Value:
        """New keys come after the cached ones, at the queries' positions."""
        return distances(self._g, queries, self._past[0][0], queries)

    def extend(self, layer: int, own: KeyValue) -> list[KeyValue]:
        """Returns cached and new rows side by side."""
        self._output(delta_names(layer), own, self._backbone, "T")
        return [self._past[layer], own]

    def keep_context(self, layer: int, backbone: Backbone, own: KeyValue) -> None:
        """Returns the rows."""
        self._output(context_names(layer), own, backbone, "T")


CACHES: Mapping[CacheForm, type[TargetCache]] = {"in-place": InPlaceCache, "delta": DeltaCache}
