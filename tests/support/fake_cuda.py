"""CUDA's runtime bindings over host memory: what is asynchronous happens when the stream is waited for, in order."""

import ctypes
import sys
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

__all__ = ["FakeCuda", "install"]

STREAM = 77
ALIGNMENT = 256


class Kind(IntEnum):
    cudaMemcpyHostToDevice = 1  # noqa: N815
    cudaMemcpyDeviceToHost = 2  # noqa: N815
    cudaMemcpyDeviceToDevice = 3  # noqa: N815


class CaptureMode(IntEnum):
    cudaStreamCaptureModeThreadLocal = 1  # noqa: N815


class FakeCuda:
    """Stands for the module ``cuda.bindings.runtime``.

    Attributes:
        device: Allocations that are alive, size by address.
        pinned: The same of page-locked host memory.
        events: What was enqueued and waited for, in order.
        room: Bytes that can still be allocated on the device.
        capturable: Whether captures succeed.
        graphs: Executable graphs that are alive: what they do.
    """

    cudaStreamNonBlocking = 1  # noqa: N815
    cudaMemcpyKind = Kind  # noqa: N815
    cudaStreamCaptureMode = CaptureMode  # noqa: N815

    def __init__(self) -> None:
        self.device: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.events: list[tuple[Any, ...]] = []
        self.room = 1 << 30
        self.capturable = True
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.capturing: list[Callable[[], None]] | None = None
        self._buffers: dict[int, Any] = {}
        self._queue: list[Callable[[], None]] = []

    def enqueue(self, stream: int, work: Callable[[], None], *event: Any) -> None:
        assert stream == STREAM, "everything belongs on the one stream"
        if self.capturing is not None:  # nothing is done, and events say nothing of what happened
            self.capturing.append(work)
            return
        self.events.append(event)
        self._queue.append(work)

    def within(self, address: int, nbytes: int, allocations: dict[int, int]) -> bool:
        return any(base <= address and address + nbytes <= base + size for base, size in allocations.items())

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:  # noqa: N802
        assert flags == self.cudaStreamNonBlocking
        return 0, STREAM

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:  # noqa: N802
        assert stream == STREAM
        return (0,)

    def cudaMalloc(self, nbytes: int) -> tuple[int, int]:  # noqa: N802
        assert self.capturing is None, "allocations break a capture off"
        if nbytes > self.room:
            return 2, 0
        self.room -= nbytes
        return 0, self._allocate(nbytes, self.device)

    def cudaFree(self, address: int) -> tuple[int]:  # noqa: N802
        self._finish()  # as the real one, which waits for the device
        self.room += self.device.pop(address)
        del self._buffers[address]
        return (0,)

    def cudaMallocHost(self, nbytes: int) -> tuple[int, int]:  # noqa: N802
        return 0, self._allocate(nbytes, self.pinned)

    def cudaFreeHost(self, address: int) -> tuple[int]:  # noqa: N802
        self._finish()
        del self.pinned[address], self._buffers[address]
        return (0,)

    def cudaMemsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> tuple[int]:  # noqa: N802
        assert self.within(address, nbytes, self.device)
        self.enqueue(stream, lambda: ctypes.memset(address, value, nbytes), "memset", nbytes)
        return (0,)

    def cudaMemcpyAsync(  # noqa: N802
        self, destination: int, source: int, nbytes: int, kind: Kind, stream: int
    ) -> tuple[int]:
        assert self.within(source, nbytes, self.device) == (kind != Kind.cudaMemcpyHostToDevice)
        assert self.within(destination, nbytes, self.device) == (kind != Kind.cudaMemcpyDeviceToHost)
        self.enqueue(stream, lambda: ctypes.memmove(destination, source, nbytes), kind.name[10:], nbytes)
        return (0,)

    def cudaMemcpy2DAsync(  # noqa: N802
        self, destination: int, to_pitch: int, source: int, pitch: int, width: int, rows: int, kind: Kind, stream: int
    ) -> tuple[int]:
        assert min(to_pitch, pitch) >= width
        for index in range(rows):
            self.cudaMemcpyAsync(destination + index * to_pitch, source + index * pitch, width, kind, stream)
            self.events.pop()
        self.events.append((kind.name[10:], width * rows))
        return (0,)

    def cudaMemset2DAsync(  # noqa: N802
        self, address: int, pitch: int, value: int, width: int, rows: int, stream: int
    ) -> tuple[int]:
        assert pitch >= width
        for index in range(rows):
            self.cudaMemsetAsync(address + index * pitch, value, width, stream)
        return (0,)

    def cudaStreamBeginCapture(self, stream: int, mode: CaptureMode) -> tuple[int]:  # noqa: N802
        assert stream == STREAM
        assert mode == CaptureMode.cudaStreamCaptureModeThreadLocal, "other threads may allocate meanwhile"
        assert self.capturing is None
        self.capturing = []
        self.events.append(("capture",))
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:  # noqa: N802
        assert stream == STREAM
        assert self.capturing is not None
        captured, self.capturing = self.capturing, None
        return (0, captured) if self.capturable else (901, None)

    def cudaGraphInstantiate(self, graph: list[Callable[[], None]], flags: int) -> tuple[int, int]:  # noqa: N802
        assert flags == 0
        handle = 1000 + len(self.events)
        self.graphs[handle] = list(graph)
        return 0, handle

    def cudaGraphDestroy(self, graph: list[Callable[[], None]]) -> tuple[int]:  # noqa: N802
        graph.clear()
        return (0,)

    def cudaGraphLaunch(self, executable: int, stream: int) -> tuple[int]:  # noqa: N802
        graph = list(self.graphs[executable])
        self.enqueue(stream, lambda: [work() for work in graph] and None, "launch")
        return (0,)

    def cudaGraphExecDestroy(self, executable: int) -> tuple[int]:  # noqa: N802
        del self.graphs[executable]
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:  # noqa: N802
        assert self.capturing is None, "waiting breaks a capture off"
        self.enqueue(stream, lambda: None, "synchronize")
        self._finish()
        return (0,)

    def cudaGetDevice(self) -> tuple[int, int]:  # noqa: N802
        return 0, 0

    def cudaGetDeviceProperties(self, device: int) -> tuple[int, Any]:  # noqa: N802
        assert device == 0
        return 0, SimpleNamespace(name=b"Fake GPU", major=9, minor=0)

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, {2: b"out of memory", 901: b"operation failed due to a previous error during capture"}[status]

    def _finish(self) -> None:
        for work in self._queue:
            work()
        self._queue.clear()

    def _allocate(self, nbytes: int, allocations: dict[int, int]) -> int:
        buffer = ctypes.create_string_buffer(b"\xab" * 64, nbytes + 64 + ALIGNMENT)  # not all zero
        address = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
        self._buffers[address] = buffer
        allocations[address] = nbytes
        return address


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Makes the fake the module that providers import."""
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", fake)
    return fake
