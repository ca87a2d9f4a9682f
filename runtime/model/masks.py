"""Attention biases that hide cached and later tokens."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.bundle.contract import (
    MASKED,
)
from dspark.runtime.bundle.manifest import CacheInfo

__all__ = ["causal_bias", "new_rows", "past_bias", "seen_bias"]


def seen_bias(last: NDArray[np.int64], capacity: int) -> NDArray[np.float32]:
    """Bias ``[…, S]`` that shows the cached tokens up to and with index ``last``, of any shape."""
    return (_indices(capacity) > last[..., None]) * np.float32(MASKED)


@lru_cache(8)
def _indices(capacity: int) -> NDArray[np.int64]:
    return np.arange(capacity)


def past_bias(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.float32]:
    """Bias ``[B, 1, 1, 1, S]`` that shows each request the first ``lengths`` cached tokens."""
    return seen_bias(lengths[:, None, None, None] - 1, capacity)


def causal_bias(requests: int, width: int, capacity: int) -> NDArray[np.float32]:
    """Bias ``[B, 1, 1, T, S + T]`` in which each new token sees the new ones up to itself."""
    bias = np.zeros((requests, 1, 1, width, capacity + width), np.float32)
    bias[..., capacity:] = np.triu(np.full((width, width), MASKED, np.float32), 1)
    return bias


def new_rows(info: CacheInfo, requests: int, width: int) -> NDArray[np.float32]:
    """A buffer ``[layers, 2, B, kv_heads, T, head_dim]`` for the rows that a graph computes."""
    return np.zeros((info.layers, 2, requests, info.kv_heads, width, info.head_dim), np.float32)
