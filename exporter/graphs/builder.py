"""A thin recorder over ``onnx_ir`` that the graph functions write to."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.packings import FLOAT32, Packing
from dspark.exporter.weights import WeightFile

if TYPE_CHECKING:
    from dspark.exporter.graphs.encodings import Encodings

__all__ = ["FLOAT", "INT64", "MICROSOFT", "GraphBuilder"]

FLOAT = ir.DataType.FLOAT
INT64 = ir.DataType.INT64
OPSET = 21
IR_VERSIONS = {21: 10, 24: 11}
"""The oldest IR version that goes with each opset."""
MICROSOFT = "com.microsoft"
"""Operators of ONNX Runtime, for precisions that the standard has no fast operator for."""
T = TypeVar("T")


class GraphBuilder:
    """Records one ONNX graph.

    Args:
        name: The graph's name.
        weights: Where weights are stored; graphs of a bundle share it.
        encodings: How linear layers and tables are stored and multiplied with.

    Attributes:
        encodings: As given.
    """

    def __init__(self, name: str, weights: WeightFile, encodings: "Encodings") -> None:
        self.encodings = encodings
        self._name = name
        self._weights = weights
        self._tape = ir.tape.Tape()
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._initializers: dict[object, ir.Value] = {}
        self._made: dict[tuple[int, str], Any] = {}
        self._domains: set[str] = set()
        self._opset = OPSET
        self._scope: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefixes the names of the nodes recorded inside, so that profiles and placement reports can be read."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def require_opset(self, version: int) -> None:
        """Raises the graph's opset for an operator that came later."""
        self._opset = max(self._opset, version)

    def input(self, name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
        """Declares a graph input; dimensions given as text are symbolic."""
        value = ir.val(name, dtype=dtype, shape=shape)
        self._inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, dtype: ir.DataType, *shape: int | str) -> None:
        """Names a computed value and declares it a graph output."""
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self._outputs.append(value)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        **attributes: int | float | str | Sequence[int],
    ) -> ir.Value:
        """Records a node with one output."""
        self._domains.add(domain)
        return self._tape.op(op_type, inputs, attributes or None, domain=domain, name=self._node_name(op_type))

    def once(self, value: ir.Value, what: str, make: Callable[[], T]) -> T:
        """What ``make`` computes of a value, recorded the first time it is asked for."""
        key = (id(value), what)
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def split(self, value: ir.Value, sizes: ir.Value | Sequence[int], axis: int = -1, count: int = 0) -> list[ir.Value]:
        """Splits along an axis into parts of the given sizes (``count`` of them when the sizes are computed)."""
        lengths = sizes if isinstance(sizes, ir.Value) else self.constant(np.asarray(sizes, np.int64))
        parts = count or len(sizes)  # type: ignore[arg-type]
        return list(
            self._tape.op_multi_out(
                "Split", [value, lengths], {"axis": axis}, num_outputs=parts, name=self._node_name("Split")
            )
        )

    def top_k(self, value: ir.Value, count: int) -> tuple[ir.Value, ir.Value]:
        """The largest values of the last axis, descending, and their indices."""
        values, indices = self._tape.op_multi_out(
            "TopK", [value, self.ints(count)], {"axis": -1}, num_outputs=2, name=self._node_name("TopK")
        )
        return values, indices

    def weight(self, name: str, tensor: LazyTensor) -> ir.Value:
        """A checkpoint tensor in float32: norms, biases."""
        (value,) = self.packed(name, tensor, FLOAT32)
        return value

    def packed(self, name: str, tensor: LazyTensor, packing: Packing, *, own: bool = False) -> list[ir.Value]:
        """A packed checkpoint tensor as initializers that refer to the file of weights, named as first used.

        Args:
            name: The initializers' name.
            tensor: What is stored, once per file of weights.
            packing: How it is stored.
            own: Whether the first initializer (the values) is for one node alone.
        """
        values, *scales = self._weights.add(tensor, packing)
        first = self.own(name, values) if own else self._initializer(id(values), values, name)
        return [first, *(self._initializer(id(scale), scale, f"{name}.scale") for scale in scales)]

    def own(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer that one node alone reads."""
        return self._initializer(object(), tensor, name)

    def constant(self, array: NDArray[np.generic] | np.generic) -> ir.Value:
        """A small constant, stored in the graph; equal ones are stored once."""
        key = (array.dtype.str, array.shape, array.tobytes())
        return self._initializer(key, ir.tensor(array), f"constant.{len(self._initializers)}")

    def floats(self, *values: float) -> ir.Value:
        """A constant float vector."""
        return self.constant(np.asarray(values, np.float32))

    def ints(self, *values: int) -> ir.Value:
        """A constant int64 vector: shapes, axes, indices."""
        return self.constant(np.asarray(values, np.int64))

    def reshape(self, value: ir.Value, *shape: int) -> ir.Value:
        """Reshapes; 0 keeps a dimension and −1 infers one, as in ONNX."""
        return self.op("Reshape", value, self.ints(*shape))

    def model(self) -> ir.Model:
        """The recorded graph as a model."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": self._opset} | {domain: 1 for domain in self._domains if domain},
            name=self._name,
        )
        return ir.Model(graph, ir_version=IR_VERSIONS[self._opset], producer_name="dspark-export")

    def _initializer(self, key: object, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        if key not in self._initializers:
            taken = {value.name for value in self._initializers.values()}
            numbered = (f"{name}.{number}" for number in count(2))
            free = next(each for each in chain([name], numbered) if each not in taken)
            self._initializers[key] = self._tape.initializer(tensor, name=free)
        return self._initializers[key]

    def _node_name(self, op_type: str) -> str:
        return "/".join([*self._scope, f"{op_type}_{len(self._tape.nodes)}"])
