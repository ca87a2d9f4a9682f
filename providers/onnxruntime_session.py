"""Sessions that ONNX Runtime runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import NDArray

from dspark.providers.errors import ProviderError, one_line
from dspark.providers.session import Call, NodeTime, PlacedNode

__all__ = ["OnnxRuntimeSession"]

KERNEL = "_kernel_time"
"""Marks a profile's events that are runs of nodes."""


class OnnxRuntimeSession:
    """A graph in an ONNX Runtime session on the host's memory.

    Args:
        model: The graph's file.
        session: The ``onnxruntime.InferenceSession``.
        folder: Where a profiled session writes.
    """

    def __init__(self, model: Path, session: Any, folder: "TemporaryDirectory[str] | None" = None) -> None:
        self._model = model
        self._session = session
        self._folder = folder  # lives as long as the session

    def bind(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> Call:
        """Binds every input and the wanted outputs to contiguous arrays.

        Raises:
            ProviderError: The graph has no such input or output.
        """
        binding = self._session.io_binding()
        try:
            for name, array in inputs.items():
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            for name, array in outputs.items():
                binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        except Exception as error:
            raise ProviderError(f"{self._model}: {name} cannot be bound: {one_line(error)}") from error
        return _BoundCall(self._model, self._session, binding, [*inputs.values(), *outputs.values()])

    def node_times(self) -> Sequence[NodeTime]:
        """What a profiled session has written down; see ``ProfiledSession``."""
        events = json.loads(Path(self._session.end_profiling()).read_text("utf-8"))
        return [
            NodeTime(event["name"].removesuffix(KERNEL), event["args"]["op_name"], event["dur"] / 1e6)
            for event in events
            if event["cat"] == "Node" and event["name"].endswith(KERNEL)
        ]

    def placed_nodes(self) -> Sequence[PlacedNode]:
        """Where each node runs, of a session that was made to write it down.

        Raises:
            ProviderError: This version of ONNX Runtime does not tell.
        """
        try:
            parts = self._session.get_provider_graph_assignment_info()
        except AttributeError as error:
            raise ProviderError("this ONNX Runtime does not tell where nodes run; 1.24 and later do") from error
        return [PlacedNode(node.name, node.op_type, part.ep_name) for part in parts for node in part.get_nodes()]


class _BoundCall:
    def __init__(self, model: Path, session: Any, binding: Any, arrays: list[NDArray[Any]]) -> None:
        self._model = model
        self._session = session
        self._binding = binding
        self._arrays = arrays  # the binding holds addresses, not references

    def run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise ProviderError(f"{self._model}: the graph cannot be run: {one_line(error)}") from error
