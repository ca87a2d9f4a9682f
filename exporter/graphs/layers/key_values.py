"""Keys and values of a layer, as they lie in the cache or come from its tokens."""

import onnx_ir as ir

from dspark.exporter.graphs.builder import GraphBuilder

__all__ = ["KeyValue", "cached_rows", "part_sizes"]

KeyValue = tuple[ir.Value, ir.Value]
"""Keys and values ``[B, Hkv, K, D]``."""


def cached_rows(g: GraphBuilder, names: tuple[str, str]) -> KeyValue:
    """A layer's cached keys and values, graph inputs ``[B, Hkv, S, D]``."""
    key, value = (g.input(name) for name in names)
    return key, value


def part_sizes(g: GraphBuilder, *keys: ir.Value) -> ir.Value:
    """int64 ``[parts]``: how many keys ``[B, Hkv, K, D]`` each part has."""
    return g.op("Concat", *[g.op("Shape", key, start=2, end=3) for key in keys], axis=0)
