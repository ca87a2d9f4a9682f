"""Utilisation and memory of devices, read from what hosts and vendors' libraries write, faked."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.providers import DeviceLoad, OnnxRuntimeProvider, find_provider
from dspark.providers.monitors import (
    AmdGpuMonitor,
    AscendMonitor,
    HostMonitor,
    IntelNpuMonitor,
    NvidiaMonitor,
)
from dspark.providers.provider import Discovery


def test_the_host_tells_what_passed_between_two_readings(tmp_path: Path) -> None:
    def stat(busy: int, idle: int) -> None:  # user nice system idle iowait irq softirq steal guest
        (tmp_path / "stat").write_text(f"cpu  {busy} 0 0 {idle - 10} 10 0 0 0 0 0\ncpu0 1 1 1 1\n")

    stat(1000, 5000)
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    250 kB\n")
    monitor = HostMonitor(tmp_path, lambda seconds: stat(1030, 5010))
    assert monitor.read() == (DeviceLoad("host", 0.75, 250 * 1024, 1000 * 1024),)
    still = HostMonitor(tmp_path, lambda seconds: None)
    assert still.read()[0].utilisation is None


def test_a_host_that_is_no_linux_tells_nothing(tmp_path: Path) -> None:
    assert HostMonitor(tmp_path).read() == ()
    (tmp_path / "stat").write_text("strange\n")
    assert HostMonitor(tmp_path).read() == ()


def test_this_host_tells() -> None:
    (load,) = find_provider("cpu").load()
    assert load.utilisation is not None
    assert 0 <= load.utilisation <= 1
    assert load.free_bytes is not None
    assert load.total_bytes is not None
    assert 0 < load.free_bytes < load.total_bytes


class NVMLError(Exception):
    pass


def nvml(**missing: Exception) -> Any:
    """The module ``pynvml`` with two GPUs."""

    def fails(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name in missing:
                raise missing[name]
            return answer(*arguments)

        return call

    calls: list[str] = []
    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: calls.append("init"),
        "nvmlShutdown": lambda: calls.append("shutdown"),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: f"H200 {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(free=7 << 30, used=1 << 30, total=8 << 30),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=40 + handle, memory=3),
    }
    functions = {name: fails(name, answer) for name, answer in answers.items()}
    return SimpleNamespace(NVMLError=NVMLError, calls=calls, **functions)


def test_nvidia_gpus() -> None:
    library = nvml()
    assert NvidiaMonitor(library).read() == (
        DeviceLoad("H200 0", 0.40, 7 << 30, 8 << 30),
        DeviceLoad("H200 1", 0.41, 7 << 30, 8 << 30),
    )
    assert library.calls == ["init", "shutdown"]


def test_the_gpu_of_an_option_is_named() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Built(OnnxRuntimeProvider):
        def discover(self) -> Discovery:
            return Discovery(tuple(load.device for load in self.load()))

    provider = Built(
        name="gpu", execution_provider="GPUExecutionProvider", precisions=frozenset(), monitor=NvidiaMonitor(nvml())
    )
    assert provider.device_name({"device_id": "1"}) == "H200 1"
    assert provider.device_name() == provider.device_name({"device_id": "2"}) == "H200 0, H200 1"
    assert replace(provider, monitor=None).device_name() is None
    assert find_provider("cpu").device_name() is None


def test_an_nvidia_slice_does_not_tell_its_utilisation() -> None:
    loads = NvidiaMonitor(nvml(nvmlDeviceGetUtilizationRates=NVMLError())).read()
    assert [(load.utilisation, load.free_bytes) for load in loads] == [(None, 7 << 30)] * 2


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_nvidia_gpus_that_fail_tell_nothing(name: str) -> None:
    assert NvidiaMonitor(nvml(**{name: NVMLError()})).read() == ()


def test_amd_gpus(tmp_path: Path) -> None:
    def card(name: str, **files: int) -> None:
        (tmp_path / name / "device").mkdir(parents=True)
        for file, value in files.items():
            (tmp_path / name / "device" / file).write_text(f"{value}\n")

    card("card0", gpu_busy_percent=30, mem_info_vram_used=100, mem_info_vram_total=400)
    card("card1")  # a display adapter of another driver
    card("card2", mem_info_vram_total=500)
    assert AmdGpuMonitor(tmp_path).read() == (
        DeviceLoad("card0", 0.3, 300, 400),
        DeviceLoad("card2", None, None, 500),
    )


def test_intel_npus(tmp_path: Path) -> None:
    device = tmp_path / "accel0" / "device"
    device.mkdir(parents=True)
    busy = device / "npu_busy_time_us"
    busy.write_text("1000000\n")
    times = iter([10.0, 10.5])

    def work(seconds: float) -> None:
        busy.write_text("1200000\n")

    monitor = IntelNpuMonitor(tmp_path, work, lambda: next(times))
    assert monitor.read() == (DeviceLoad("accel0", pytest.approx(0.4), None, None),)
    assert IntelNpuMonitor(tmp_path / "none").read() == ()


USAGES = """
    NPU ID                         : 1
    Chip Count                     : 1

    DDR Capacity(MB)               : 0
    HBM Capacity(MB)               : 65536
    HBM Usage Rate(%)              : 25
    Aicore Usage Rate(%)           : 60
    HBM Bandwidth Usage Rate(%)    : 7
    Chip ID                        : 0
"""


def test_ascend_npus(tmp_path: Path) -> None:
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> str:
        asked.append(command)
        return USAGES

    for name in ("davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    assert AscendMonitor(run, tmp_path).read() == (DeviceLoad("npu 1", 0.6, 48 << 30, 64 << 30),)
    assert asked == [["npu-smi", "info", "-t", "usages", "-i", "1"]]
    assert AscendMonitor(lambda command: "", tmp_path).read() == (DeviceLoad("npu 1", None, None, None),)


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("npu-smi", 5)])
def test_an_ascend_host_without_the_tool_tells_nothing(error: Exception, tmp_path: Path) -> None:
    def run(command: Sequence[str]) -> str:
        raise error

    (tmp_path / "davinci0").touch()
    assert AscendMonitor(run, tmp_path).read() == ()


def test_a_provider_whose_devices_do_not_tell() -> None:
    assert find_provider("coreml").load() == ()
