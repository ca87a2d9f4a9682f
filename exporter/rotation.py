"""Rotations that spread outliers over neighbouring channels before values are rounded to whole numbers.

A few channels of a language model's activations are far larger than the others, and a scale that fits them leaves the
others a handful of steps. Multiplied by a Hadamard matrix, activations and weights alike, a product stays what it was
while every channel gets its share (Ashkboos et al., "QuaRot", arXiv:2404.00456, here in blocks).
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["block_size", "hadamard"]

LARGEST_BLOCK = 64


def block_size(channels: int) -> int:
    """Channels that are rotated together: the largest power of two up to 64 that divides them."""
    return min(LARGEST_BLOCK, channels & -channels)


@cache
def hadamard(size: int) -> NDArray[np.float32]:
    """The symmetric orthogonal Hadamard matrix ``[size, size]`` of a power of two: its own inverse."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(size**0.5)
