"""Where the flat tokens of a step lie in its padded form."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Places", "places"]


@dataclass(frozen=True)
class Places:
    """Where flat tokens lie.

    Attributes:
        offsets: Each request's first flat token, and N.
        owner: Request of each flat token, int64 ``[N]``.
        within: Its index among that request's tokens, int64 ``[N]``.
        pad_index: Flat token at each place of the padded ``[R, T]``.
        unpad_index: Place of each flat token in R · T, int64 ``[N]``.
    """

    offsets: tuple[int, ...]
    owner: NDArray[np.int64]
    within: NDArray[np.int64]
    pad_index: NDArray[np.int64]
    unpad_index: NDArray[np.int64]


@lru_cache(32)
def places(counts: tuple[int, ...], width: int) -> Places:
    """Of requests with so many tokens each, padded to ``width``; rounds of few requests are often like one before."""
    ends = np.cumsum(counts, dtype=np.int64)
    begins = ends - np.asarray(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(ends[-1]) - begins[owner]
    pad_index = np.minimum(begins[:, None] + np.arange(width), ends[:, None] - 1)
    return Places((0, *ends.tolist()), owner, within, pad_index, owner * width + within)
