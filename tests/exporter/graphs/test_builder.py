"""The builder: a graph has the inputs and outputs of its specification, no more and no less."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.packings import INT8
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.graph_specs import GraphSpec, TensorSpec
from tests.exporter.graphs.recorded import ArrayTensor, assert_computes, random, record_nothing

X = TensorSpec("x", np.dtype(np.float32), ("N", 4))
INDEX = TensorSpec("index", np.dtype(np.int64), ("K",))
Y = TensorSpec("y", np.dtype(np.float32), ("K", 4))


@pytest.fixture
def builder(tmp_path: Path) -> GraphBuilder:
    return record_nothing(GraphSpec("graph", (X, INDEX), (Y,)), tmp_path)


def gathered(g: GraphBuilder) -> ir.Value:
    index = g.input("index")  # not in the specification's order
    return g.op("Gather", g.input("x"), index, axis=0)


def test_inputs_and_outputs_are_those_of_the_specification(builder: GraphBuilder) -> None:
    builder.output("y", gathered(builder))
    graph = builder.model().graph
    assert graph.name == "graph"
    found = [(value.name, value.dtype, value.shape) for value in (*graph.inputs, *graph.outputs)]
    assert found == [
        ("x", ir.DataType.FLOAT, ir.Shape(("N", 4))),
        ("index", ir.DataType.INT64, ir.Shape(("K",))),
        ("y", ir.DataType.FLOAT, ir.Shape(("K", 4))),
    ]


def test_an_input_is_one_value_however_often_it_is_read(builder: GraphBuilder) -> None:
    assert builder.input("x") is builder.input("x")


def test_no_other_input_or_output_can_be_declared(builder: GraphBuilder) -> None:
    with pytest.raises(KeyError, match="z"):
        builder.input("z")
    with pytest.raises(KeyError, match="x"):
        builder.output("x", builder.input("index"))


def test_a_graph_without_one_of_its_outputs_is_no_model(builder: GraphBuilder) -> None:
    gathered(builder)
    with pytest.raises(KeyError, match="y"):
        builder.model()


def test_a_graph_that_ignores_an_input_is_no_model(builder: GraphBuilder) -> None:
    builder.output("y", builder.op("Relu", builder.input("x")))
    with pytest.raises(KeyError, match="index"):
        builder.model()


def test_equal_constants_are_stored_once(builder: GraphBuilder) -> None:
    assert builder.ints(1, 2) is builder.constant(np.array([1, 2]))
    assert builder.ints(1) is not builder.floats(1.0)
    assert builder.ints(1) is not builder.constant(np.int64(1))  # a vector of one is no scalar


def test_a_weight_is_stored_once_in_each_packing(tmp_path: Path) -> None:
    tensor = ArrayTensor("table.weight", random(3, 4))
    with WeightFile(tmp_path / "weights.bin", lambda count: None) as weights:
        g = GraphBuilder(GraphSpec("graph", (), ()), weights)
        value = g.weight("table.weight", tensor)
        assert g.weight("table.weight", tensor) is value
        packed = g.packed("table.weight", tensor, INT8)
        assert [each.name for each in packed] == ["table.weight.2", "table.weight.scale"]
        assert [each.shape for each in packed] == [ir.Shape((3, 4)), ir.Shape((3,))]
        assert value not in packed


def test_what_is_computed_once_per_value(builder: GraphBuilder) -> None:
    calls: list[str] = []
    x, index = builder.input("x"), builder.input("index")
    for value, what in ((x, "a"), (x, "a"), (x, "b"), (index, "a")):
        builder.once(value, what, lambda name=what: calls.append(name))  # type: ignore[misc]
    assert calls == ["a", "b", "a"]


def test_nodes_are_named_by_their_scopes(builder: GraphBuilder) -> None:
    with builder.scope("layers.0"), builder.scope("mlp"):
        inside = builder.op("Relu", builder.input("x"))
    outside = builder.op("Relu", inside)
    names = [value.producer().name for value in (inside, outside)]  # type: ignore[union-attr]
    assert names == ["layers.0/mlp/Relu_0", "Relu_1"]


@pytest.mark.parametrize(("required", "expected"), [((), (21, 10)), ((24,), (24, 11)), ((24, 21), (24, 11))])
def test_the_opset_is_the_newest_that_an_operator_needs(
    required: tuple[int, ...], expected: tuple[int, int], builder: GraphBuilder
) -> None:
    for version in required:
        builder.require_opset(version)
    builder.output("y", gathered(builder))
    model = builder.model()
    assert (model.graph.opset_imports[""], model.ir_version) == expected


def test_split_top_k_reshape_and_unsqueeze() -> None:
    x = random(3, 5)

    def record(g: GraphBuilder) -> list[ir.Value]:
        left, right = g.split(g.input("x"), [2, 3])
        values, indices = g.top_k(right, 2)
        return [left, g.unsqueeze(values, 0), indices, g.reshape(left, -1)]

    order = np.argsort(-x[:, 2:], axis=1)[:, :2]
    top = np.take_along_axis(x[:, 2:], order, 1)
    assert_computes(record, {"x": x}, x[:, :2], top[None], order, x[:, :2].ravel())
