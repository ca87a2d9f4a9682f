"""How flat tokens are regrouped per request for attention, and back."""

from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from dspark.exporter.graphs.builder import GraphBuilder

__all__ = ["BlockTokens", "RaggedTokens", "TokenLayout"]


class TokenLayout(Protocol):
    """How flat rows are regrouped for attention."""

    def group(self, g: GraphBuilder, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
        """``[N, heads, D]`` → ``[B, heads, T, D]``."""

    def flatten(self, g: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
        """``[B, heads, T, D]`` → ``[N, width]``."""


@dataclass(frozen=True)
class RaggedTokens:
    """Requests of different lengths: two indices say where each flat token belongs, so a step costs what it verifies.

    Attributes:
        pad_index: int64 ``[B, T]``: the flat token at each request's place; padding repeats any.
        unpad_index: int64 ``[N]``: each flat token's place among B · T.
    """

    pad_index: ir.Value
    unpad_index: ir.Value

    def group(self, g: GraphBuilder, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
        """``[N, heads, D]`` → ``[B, heads, T, D]``."""
        return g.op("Transpose", g.op("Gather", x, self.pad_index, axis=0), perm=[0, 2, 1, 3])

    def flatten(self, g: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
        """``[B, heads, T, D]`` → ``[N, width]``."""
        rows = g.reshape(g.op("Transpose", x, perm=[0, 2, 1, 3]), -1, width)
        return g.op("Gather", rows, self.unpad_index, axis=0)


@dataclass(frozen=True)
class BlockTokens:
    """Requests with the same number of tokens, ``N = B · T``.

    Attributes:
        shape: int64 ``[2]``: B and T; −1 infers one of them.
    """

    shape: ir.Value

    def group(self, g: GraphBuilder, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
        """``[N, heads, D]`` → ``[B, heads, T, D]``."""
        blocks = g.op("Reshape", x, g.op("Concat", self.shape, g.ints(heads, head_dim), axis=0))
        return g.op("Transpose", blocks, perm=[0, 2, 1, 3])

    def flatten(self, g: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
        """``[B, heads, T, D]`` → ``[N, width]``."""
        return g.reshape(g.op("Transpose", x, perm=[0, 2, 1, 3]), -1, width)
