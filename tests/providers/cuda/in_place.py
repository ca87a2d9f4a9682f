"""A graph that writes its cache in place."""

from pathlib import Path

import onnx_ir as ir

__all__ = ["in_place_graph"]


def in_place_graph(folder: Path) -> Path:
    """``present = TensorScatter(past, new, row)``, ``total = ReduceSum(present)``."""
    tape = ir.tape.Tape()
    shapes = {"past": ("B", 2, "S", 4), "new": ("B", 2, "T", 4)}
    past, new = (ir.val(name, ir.DataType.FLOAT, shape) for name, shape in shapes.items())
    row = ir.val("row", ir.DataType.INT64, ("B",))
    present = tape.op("TensorScatter", [past, new, row], {"axis": -2})
    present.name, present.type, present.shape = "present", ir.TensorType(ir.DataType.FLOAT), ir.Shape(shapes["past"])
    total = tape.op("ReduceSum", [present], {"keepdims": 0})
    total.name, total.type, total.shape = "total", ir.TensorType(ir.DataType.FLOAT), ir.Shape(())
    graph = ir.Graph([past, new, row], [present, total], nodes=tape.nodes, opset_imports={"": 24}, name="in_place")
    ir.save(ir.Model(graph, ir_version=11), folder / "in_place.onnx")
    return folder / "in_place.onnx"
