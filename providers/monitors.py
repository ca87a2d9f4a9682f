"""How busy devices are and how much memory they have left, where the host or a vendor's library tells."""

import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "AmdGpuMonitor",
    "AscendMonitor",
    "DeviceLoad",
    "DeviceMonitor",
    "HostMonitor",
    "IntelNpuMonitor",
    "NvidiaMonitor",
]

INTERVAL = 0.1
"""Seconds over which a counter of busy time is watched."""
COMMAND_SECONDS = 5.0
"""A vendor's tool that has not answered by then tells nothing."""


@dataclass(frozen=True)
class DeviceLoad:
    """One device at one moment; None where the device does not tell.

    Attributes:
        device: Its name.
        utilisation: Share of time that it computes, 0 to 1.
        free_bytes: Memory that is not taken.
        total_bytes: Memory that it has.
    """

    device: str
    utilisation: float | None
    free_bytes: int | None
    total_bytes: int | None


class DeviceMonitor(Protocol):
    """Reads the load of a family of devices."""

    def read(self) -> Sequence[DeviceLoad]:
        """The load of each device that is there and tells; never raises."""


@dataclass(frozen=True)
class HostMonitor:
    """The host's processors and memory, from Linux' ``/proc`` (proc(5)).

    Attributes:
        root: Where ``stat`` and ``meminfo`` lie.
        wait: Sleeps between two readings of busy time.
    """

    root: Path = Path("/proc")
    wait: Callable[[float], None] = time.sleep

    def read(self) -> Sequence[DeviceLoad]:
        """The load of all cores together."""
        try:
            busy, total = self._times()
            self.wait(INTERVAL)
            later_busy, later_total = self._times()
            memory = {
                line.split(":")[0]: int(line.split()[1]) << 10 for line in _text(self.root / "meminfo").splitlines()
            }
            free, whole = memory["MemAvailable"], memory["MemTotal"]
        except (OSError, KeyError, ValueError, IndexError):  # no Linux
            return ()
        passed = later_total - total
        return (DeviceLoad("host", (later_busy - busy) / passed if passed else None, free, whole),)

    def _times(self) -> tuple[int, int]:
        """Ticks since boot that the cores computed, and all ticks."""
        ticks = [int(field) for field in _text(self.root / "stat").split("\n", 1)[0].split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle and waiting for disks


@dataclass(frozen=True)
class NvidiaMonitor:
    """NVIDIA GPUs, from the NVIDIA Management Library through ``nvidia-ml-py``.

    Attributes:
        nvml: The library's module; None imports it.
    """

    nvml: Any = None

    def read(self) -> Sequence[DeviceLoad]:
        """The load of each GPU; nothing without the library or its driver."""
        try:
            nvml = self.nvml or import_module("pynvml")
        except ImportError:
            return ()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # no driver
            return ()
        try:
            return tuple(self._device(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        except nvml.NVMLError:  # a GPU fell off the bus
            return ()
        finally:
            nvml.nvmlShutdown()

    @staticmethod
    def _device(nvml: Any, index: int) -> DeviceLoad:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            utilisation = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except nvml.NVMLError:  # a MIG slice does not tell
            utilisation = None
        return DeviceLoad(nvml.nvmlDeviceGetName(handle), utilisation, memory.free, memory.total)


@dataclass(frozen=True)
class AmdGpuMonitor:
    """AMD GPUs, from what Linux' amdgpu driver writes (kernel documentation, "amdgpu: GPU busy, memory").

    Attributes:
        root: Where the devices lie.
    """

    root: Path = Path("/sys/class/drm")

    def read(self) -> Sequence[DeviceLoad]:
        """The load of each GPU whose driver tells."""
        loads = []
        for folder in sorted(self.root.glob("card*/device")):
            busy, used, total = (
                _number(folder / name) for name in ("gpu_busy_percent", "mem_info_vram_used", "mem_info_vram_total")
            )
            if total is not None:
                free = None if used is None else total - used
                loads.append(DeviceLoad(folder.parent.name, None if busy is None else busy / 100, free, total))
        return tuple(loads)


@dataclass(frozen=True)
class IntelNpuMonitor:
    """Intel NPUs, from what Linux' intel_vpu driver writes (kernel documentation, ABI ``sysfs-driver-ivpu``).

    They compute in the host's memory, of which the driver tells only what is taken.

    Attributes:
        root: Where the devices lie.
        wait: Sleeps between two readings of busy time.
        now: The time in seconds.
    """

    root: Path = Path("/sys/class/accel")
    wait: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic

    def read(self) -> Sequence[DeviceLoad]:
        """The load of each NPU whose driver tells."""
        files = sorted(self.root.glob("accel*/device/npu_busy_time_us"))
        if not files:
            return ()
        before, start = [_number(file) for file in files], self.now()
        self.wait(INTERVAL)
        after, passed = [_number(file) for file in files], self.now() - start
        return tuple(
            DeviceLoad(file.parts[-3], min((late - early) / 1e6 / passed, 1.0), None, None)
            for file, early, late in zip(files, before, after, strict=True)
            if early is not None and late is not None
        )


@dataclass(frozen=True)
class AscendMonitor:
    """Huawei Ascend NPUs, from the driver's tool ``npu-smi info -t usages -i CARD``.

    Attributes:
        run: Runs a command and returns what it prints; raises OSError or SubprocessError if there is none.
        devices: Where the driver's devices appear, ``davinci0`` and so on.
    """

    run: Callable[[Sequence[str]], str] = lambda command: (
        subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True).stdout
    )
    devices: Path = Path("/dev")

    def read(self) -> Sequence[DeviceLoad]:
        """The load of each NPU; nothing without the tool."""
        loads = []
        cards = [file.name.removeprefix("davinci") for file in sorted(self.devices.glob("davinci[0-9]*"))]
        for card in cards:
            try:
                printed = self.run(["npu-smi", "info", "-t", "usages", "-i", card])
            except (OSError, subprocess.SubprocessError):
                return ()
            figures = {
                name.strip(): int(value) for name, value in re.findall(r"^\s*(.+?)\s*:\s*(\d+)\s*$", printed, re.M)
            }
            busy, total = figures.get("Aicore Usage Rate(%)"), figures.get("HBM Capacity(MB)")
            used = figures.get("HBM Usage Rate(%)")
            loads.append(
                DeviceLoad(
                    f"npu {card}",
                    None if busy is None else busy / 100,
                    None if total is None or used is None else (total << 20) * (100 - used) // 100,
                    None if total is None else total << 20,
                )
            )
        return tuple(loads)


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace")


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except (OSError, ValueError):
        return None
