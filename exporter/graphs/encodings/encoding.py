"""What an encoding is: how a matrix of weights is stored, and how a graph multiplies with it."""

from abc import ABC, abstractmethod

import onnx_ir as ir

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import GraphBuilder

__all__ = ["Encoding"]


class Encoding(ABC):
    """One precision of linear layers and tables. Values between layers are float32 in every encoding.

    Attributes:
        rounds_inputs: Whether what is multiplied with may be rounded to whole numbers.
    """

    rounds_inputs = False

    @abstractmethod
    def multiply(self, g: GraphBuilder, x: ir.Value, name: str, weight: LazyTensor) -> ir.Value:
        """``x Wᵀ``.

        Args:
            g: The graph.
            x: float32 ``[N, in]``.
            name: The weight's name.
            weight: ``[out, in]``.

        Returns:
            float32 ``[N, out]``.
        """

    @abstractmethod
    def look_up(self, g: GraphBuilder, ids: ir.Value, name: str, table: LazyTensor) -> ir.Value:
        """Rows of a table.

        Args:
            g: The graph.
            ids: int64 ``[N]``; of any shape in encodings that do not round what is multiplied with.
            name: The table's name.
            table: ``[V, H]``.

        Returns:
            float32 ``[N, H]``, or that shape and ``H``.
        """
