"""CUDA graphs: work that was captured from a stream once, and is launched as one.

A graph repeats shapes and addresses, so it belongs to one bound call, and is worth its capture where calls repeat: one
token per request, drafts.
"""

import weakref
from collections.abc import Callable

from dspark.providers.cuda.memory import Cuda
from dspark.providers.errors import ProviderError
from dspark.providers.provider import Options

__all__ = ["CAPTURED_AFTER", "ENABLE_CUDA_GRAPH", "CudaGraph", "wants_cuda_graphs"]

ENABLE_CUDA_GRAPH = "enable_cuda_graph"
"""The option that turns them on."""
CAPTURED_AFTER = 8
"""Runs of a call before it is captured: a capture costs some runs, and what ran often will run again."""


def wants_cuda_graphs(options: Options) -> bool:
    """Whether a provider's options ask for CUDA graphs.

    Raises:
        ProviderError: The option has a value that means nothing.
    """
    value = options.get(ENABLE_CUDA_GRAPH, "0")
    if value not in ("0", "1"):
        raise ProviderError(f"{ENABLE_CUDA_GRAPH} is {value!r}; it must be 0 or 1")
    return value == "1"


class CudaGraph:
    """What was captured from a stream.

    Args:
        cuda: The device and the stream.
        enqueue: Enqueues the work, which is captured instead of done.

    Raises:
        ProviderError: The work cannot be captured; the stream is as before.
    """

    def __init__(self, cuda: Cuda, enqueue: Callable[[], None]) -> None:
        self._cuda = cuda
        mode = cuda.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal  # other threads may allocate
        cuda.call("cudaStreamBeginCapture", cuda.stream, mode)
        try:
            enqueue()
        finally:
            graph = cuda.call("cudaStreamEndCapture", cuda.stream)
        self._executable = cuda.call("cudaGraphInstantiate", graph, 0)
        weakref.finalize(self, cuda.runtime.cudaGraphExecDestroy, self._executable)
        cuda.call("cudaGraphDestroy", graph)

    def launch(self) -> None:
        """Enqueues the work.

        Raises:
            ProviderError: The device failed.
        """
        self._cuda.call("cudaGraphLaunch", self._executable, self._cuda.stream)
