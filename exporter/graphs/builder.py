"""A thin recorder over ``onnx_ir`` that the graph functions write to."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.packings import FLOAT32, Packing
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.graph_specs import GraphSpec, TensorSpec

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
    """Records one ONNX graph, whose inputs and outputs are those of its specification.

    Args:
        spec: The graph's name, inputs and outputs.
        weights: Where weights are stored; graphs of a bundle share it.
    """

    def __init__(self, spec: GraphSpec, weights: WeightFile) -> None:
        self._spec = spec
        self._weights = weights
        self._tape = ir.tape.Tape()
        self._inputs: dict[str, ir.Value] = {}
        self._outputs: dict[str, ir.Value] = {}
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

    def input(self, name: str) -> ir.Value:
        """A graph input.

        Raises:
            KeyError: The specification has no such input.
        """
        if name not in self._inputs:
            spec = _named(self._spec.inputs, name)
            self._inputs[name] = ir.val(name, dtype=ir.DataType.from_numpy(spec.dtype), shape=spec.shape)
        return self._inputs[name]

    def output(self, name: str, value: ir.Value) -> None:
        """Makes a computed value a graph output.

        Raises:
            KeyError: The specification has no such output.
        """
        spec = _named(self._spec.outputs, name)
        value.name, value.shape = name, ir.Shape(spec.shape)
        value.type = ir.TensorType(ir.DataType.from_numpy(spec.dtype))
        self._outputs[name] = value

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

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """Inserts dimensions of one."""
        return self.op("Unsqueeze", value, self.ints(*axes))

    def model(self) -> ir.Model:
        """The recorded graph as a model.

        Raises:
            KeyError: It has not read an input of the specification, or not computed an output.
        """
        graph = ir.Graph(
            [self._inputs[spec.name] for spec in self._spec.inputs],
            [self._outputs[spec.name] for spec in self._spec.outputs],
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": self._opset} | {domain: 1 for domain in self._domains if domain},
            name=self._spec.name,
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


def _named(specs: Sequence[TensorSpec], name: str) -> TensorSpec:
    return {spec.name: spec for spec in specs}[name]
