"""Shapes of the inputs of each kind of graph, as far as they tell the kind and the profiles."""

from dspark.providers.tensorrt.profiles import SymbolicShape

__all__ = ["BLOCK", "EAGLE3", "HEAD", "TARGET"]

TARGET: tuple[SymbolicShape, ...] = (
    ("N",), ("B", "T"), ("B", 1, 1, "T", "S+T"), ("K",), ("B", 3, "S", 64),
)  # fmt: skip
BLOCK: tuple[SymbolicShape, ...] = (("B",), ("B", 1, 1, 1, "S"), ("B", 3, "S", 64))
HEAD: tuple[SymbolicShape, ...] = (("B", 5, 64), ("B",))
EAGLE3: tuple[SymbolicShape, ...] = (("B", "T"), ("B", "T", 64), ("B", 1, 1, "T", "S+T"), ("B", 3, "S", 64), ("B", 5))
