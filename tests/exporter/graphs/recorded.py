"""Small graphs recorded with the exporter's builder, run by ONNX Runtime and compared with what they must compute."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from dspark.exporter.checkpoints.description import Backbone, Layer, Rope
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.encodings import Encodings, Float32
from dspark.exporter.graphs.layers import Model
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.graph_specs import GraphSpec, TensorSpec

__all__ = ["Array", "ArrayTensor", "assert_computes", "compute", "make_model", "random", "record_nothing"]

Array = NDArray[Any]
Record = Callable[[GraphBuilder], Sequence[ir.Value]]

FREQUENCIES = (1.0, 0.1, 0.01)
SIZES = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "head_count": 4,
    "kv_head_count": 2,
    "head_dim": 6,
    "norm_epsilon": 1e-5,
    "rope": Rope(FREQUENCIES),
    "layers": (Layer(),),
}


class ArrayTensor(LazyTensor):
    """A checkpoint's tensor that lies in memory."""

    def __init__(self, name: str, array: Array) -> None:
        self.name = name
        self.shape = array.shape
        self._array = np.asarray(array, np.float32)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._array[start:stop]


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Normally distributed numbers."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


def make_model(g: GraphBuilder, tensors: Mapping[str, Array] | None = None, **sizes: Any) -> Model:
    """A float32 model of small sizes with these tensors."""
    lazy = {name: ArrayTensor(name, array) for name, array in (tensors or {}).items()}
    return Model(g, Backbone(**(SIZES | sizes)), lazy, Encodings(Float32(), Float32()))


def compute(record: Record, inputs: Mapping[str, Array], shapes: Sequence[tuple[type, tuple[int, ...]]]) -> list[Array]:
    """The values that ``record`` returns, for graph inputs of these names; their types and shapes must be known."""
    given = tuple(TensorSpec(name, array.dtype, array.shape) for name, array in inputs.items())
    wanted = tuple(TensorSpec(f"out.{index}", np.dtype(dtype), shape) for index, (dtype, shape) in enumerate(shapes))
    with tempfile.TemporaryDirectory() as folder:
        with WeightFile(Path(folder) / "weights.bin", lambda count: None) as weights:
            g = GraphBuilder(GraphSpec("test", given, wanted), weights)
            for spec in given:
                g.input(spec.name)
            for spec, value in zip(wanted, record(g), strict=True):
                g.output(spec.name, value)
            model = g.model()
        ir.save(model, Path(folder) / "test.onnx")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(f"{folder}/test.onnx", options, providers=["CPUExecutionProvider"])
        computed: list[Array] = session.run([spec.name for spec in wanted], dict(inputs))
    return computed


def assert_computes(record: Record, inputs: Mapping[str, Array], *expected: Array, tolerance: float = 1e-5) -> None:
    """What ``record`` returns is expected: whole numbers exactly, floats within a part of the largest."""
    shapes = [(np.int64 if each.dtype.kind == "i" else np.float32, each.shape) for each in expected]
    for found, wanted in zip(compute(record, inputs, shapes), expected, strict=True):
        assert found.shape == wanted.shape
        if wanted.dtype.kind == "i":
            assert np.array_equal(found, wanted)
        else:
            assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


def record_nothing(spec: GraphSpec, folder: Path) -> GraphBuilder:
    """A builder that has recorded nothing yet."""
    with WeightFile(folder / "weights.bin", lambda count: None) as weights:
        return GraphBuilder(spec, weights)
