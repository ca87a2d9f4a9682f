"""Sessions that ONNX Runtime runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import NDArray

from dspark.providers.errors import ProviderError
from dspark.providers.session import Call, NodeTime

__all__ = ["OnnxRuntimeSession"]

INSTALL_HINT = (
    "ONNX Runtime is not installed; install one build of it with an extra, for example "
    "pip install 'dspark-onnx[cpu]' (others: cuda, tensorrt, openvino, qnn, cann)"
)


KERNEL = "_kernel_time"
"""Marks a profile's events that are runs of nodes."""


class OnnxRuntimeSession:
    """A graph in an ONNX Runtime session on the host's memory.

    Args:
        model: The graph's file.
        provider: Name of the execution provider in ONNX Runtime.
        threads: Worker threads; None lets ONNX Runtime choose one a core.
        profiled: Whether the cost of every node is written down, which costs time itself.
    """

    def __init__(self, model: Path, provider: str, threads: int | None, *, profiled: bool = False) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ProviderError(INSTALL_HINT) from error
        available = onnxruntime.get_available_providers()
        if provider not in available:  # ONNX Runtime itself would fall back to the CPU without a word
            raise ProviderError(f"{provider} is not in this ONNX Runtime; it has {', '.join(available)}")
        self._model = model
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        if profiled:
            self._folder = TemporaryDirectory()
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(self._folder.name) / model.stem)
        # The sessions of a bundle take turns on the same cores: workers must not spin into the next one's run.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session = onnxruntime.InferenceSession(str(model), options, providers=[provider])
        except Exception as error:  # the binding raises its own classes, which share no public base
            raise ProviderError(f"{model}: {provider} cannot load the graph: {_one_line(error)}") from error

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
            raise ProviderError(f"{self._model}: {name} cannot be bound: {_one_line(error)}") from error
        return _BoundCall(self._model, self._session, binding, [*inputs.values(), *outputs.values()])

    def node_times(self) -> Sequence[NodeTime]:
        """What a profiled session has written down; see ``ProfiledSession``."""
        events = json.loads(Path(self._session.end_profiling()).read_text("utf-8"))
        return [
            NodeTime(event["name"].removesuffix(KERNEL), event["args"]["op_name"], event["dur"] / 1e6)
            for event in events
            if event["cat"] == "Node" and event["name"].endswith(KERNEL)
        ]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


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
            raise ProviderError(f"{self._model}: the graph cannot be run: {_one_line(error)}") from error
