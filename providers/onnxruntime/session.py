"""Sessions that ONNX Runtime runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import NDArray

from dspark.providers.errors import ProviderError, one_line
from dspark.providers.session import Buffer, Call, NodeTime, PlacedNode

__all__ = ["OnnxRuntimeSession"]

KERNEL = "_kernel_time"
"""Marks a profile's events that are runs of nodes."""
HOST_MEMORY = "Cpu"
"""ONNX Runtime's name of the host's memory."""
MISMATCH = "the bundle's manifest describes another graph"


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
            ProviderError: They are not the graph's inputs and outputs, or not of their shapes.
        """
        self._check(inputs, outputs)
        binding = self._session.io_binding()

        def bind_inputs() -> None:
            for name, array in inputs.items():
                self._bind_one(binding.bind_input, name, array, array.ctypes.data)

        bind_inputs()
        for name, array in outputs.items():
            self._bind_one(binding.bind_output, name, array, array.ctypes.data)

        kept = [*inputs.values(), *outputs.values()]  # the binding holds addresses, not references
        return _BoundCall(self._run_binding, binding, bind_inputs if self._copies_inputs() else None, kept)

    def _copies_inputs(self) -> bool:
        """Whether the device has memory of its own: ONNX Runtime copies inputs there when they are *bound*."""
        try:
            return any(memory.name != HOST_MEMORY for memory in self._session.get_input_memory_infos())
        except AttributeError:  # before 1.23 it does not tell
            return True

    def _bind_one(self, bind: Callable[..., None], name: str, array: Buffer, address: int, memory: str = "cpu") -> None:
        """Binds a name to memory that has an array's shape and type."""
        try:
            bind(name, memory, 0, array.dtype.type, array.shape, address)
        except Exception as error:  # the binding raises its own classes, which share no public base
            raise ProviderError(f"{self._model}: {name} cannot be bound: {one_line(error)}") from error

    def _run_binding(self, binding: Any, options: Any = None) -> None:
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:  # as above
            raise ProviderError(f"{self._model}: the graph cannot be run: {one_line(error)}") from error

    def _check(self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> None:
        """Compares what is to be bound with the graph, where the sizes that are not symbols must be the same."""
        for kind, bound, known in (("input", inputs, self._inputs), ("output", outputs, self._outputs)):
            for name, array in bound.items():
                shape = known.get(name)
                if shape is None:
                    raise ProviderError(f"{self._model}: the graph has no {kind} {name}; {MISMATCH}")
                if len(shape) != len(array.shape) or any(
                    isinstance(size, int) and size != found for size, found in zip(shape, array.shape, strict=True)
                ):
                    raise ProviderError(
                        f"{self._model}: {kind} {name} has shape {_shown(shape)} in the graph and is called with "
                        f"{_shown(array.shape)}; {MISMATCH}"
                    )
        for name, shape in self._inputs.items():
            if name not in inputs:
                raise ProviderError(f"{self._model}: input {name} {_shown(shape)} is not given; {MISMATCH}")

    @cached_property
    def _inputs(self) -> dict[str, Sequence[int | str]]:
        return {tensor.name: tensor.shape for tensor in self._session.get_inputs()}

    @cached_property
    def _outputs(self) -> dict[str, Sequence[int | str]]:
        return {tensor.name: tensor.shape for tensor in self._session.get_outputs()}

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


def _shown(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


@dataclass(frozen=True)
class _BoundCall:
    """A bound call; see ``Call``."""

    execute: Callable[[Any], None]
    binding: Any
    bind_inputs: Callable[[], None] | None
    kept: list[NDArray[Any]]

    def run(self) -> None:
        if self.bind_inputs is not None:
            self.bind_inputs()
        self.execute(self.binding)
