"""Where arrays lie: on the device only if all graphs that share them run there."""

from typing import Any

import numpy as np
import pytest

from dspark.providers.session import SessionLimits
from dspark.runtime.cache.allocation import common_allocator, host_zeros


class OnHost:
    limits = SessionLimits()

    def bind(self, inputs: Any, outputs: Any) -> Any:
        raise NotImplementedError


class OnDevice(OnHost):
    def device_array(self, shape: tuple[int, ...], dtype: Any) -> str:
        return f"device {shape}"


@pytest.mark.parametrize(
    ("sessions", "device"),
    [([OnDevice()], True), ([OnDevice(), OnDevice()], True), ([OnDevice(), OnHost()], False), ([OnHost()], False)],
)
def test_arrays_are_shared_on_a_device_or_on_the_host(sessions: list[Any], device: bool) -> None:
    made = common_allocator(sessions, host_zeros)((1, 2, 1, 1), np.float32)
    assert (made == "device (1, 2, 1, 1)") if device else isinstance(made, np.ndarray)


@pytest.mark.parametrize("slots", [1, 3])
def test_zeros_of_a_shape_can_be_written(slots: int) -> None:
    zeros = host_zeros((2, 2, slots, 1, 64, 8), np.float32)
    assert (zeros.shape, zeros.dtype) == ((2, 2, slots, 1, 64, 8), np.float32)
    assert not zeros.any()
    zeros[1, 1, slots - 1] = 1
    assert zeros.sum() == 64 * 8
