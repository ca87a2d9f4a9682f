"""Where caches and buffers lie: in the host's memory or in a device's."""

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.providers.session import DeviceSession, Session, limits_of

__all__ = ["common_allocator", "fixed_capacity", "host_zeros"]


def host_zeros(shape: tuple[int, ...], dtype: type[np.float32]) -> NDArray[np.float32]:
    """Zeros ``[layers, 2, slots, …]``, which cost no memory until they are overwritten.

    Of several slots, used rows lie scattered among unused ones. In huge pages, which NumPy asks for, every few
    kilobytes touched would cost two megabytes of zeros: 60 to 300 ms when a cache of eight slots grows, instead of 9.
    One slot is used from end to end, and huge pages make its growth three times as fast.
    """
    if shape[2] == 1 or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    size = np.dtype(dtype).itemsize * math.prod(shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def common_allocator(sessions: Sequence[Session], on_host: Callable[..., Any]) -> Callable[..., Any]:
    """Makes arrays that all of the graphs read or write: on the device if they run on one, else on the host."""
    device = [session.device_array for session in sessions if isinstance(session, DeviceSession)]
    return device[0] if len(device) == len(sessions) else on_host


def fixed_capacity(sessions: Mapping[str, Session]) -> int | None:
    """Rows that the cache must have, if the target was compiled for one size."""
    limits = limits_of(sessions["target"])
    return limits.cache_tokens if limits.fixed_cache else None
