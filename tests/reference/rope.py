"""Rotary position embedding with the scalings of transformers: default, linear, dynamic, llama3 and yarn."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layers import Array

__all__ = ["Rope"]


class Rope:
    """Rotates query and key heads.

    Args:
        config: A backbone configuration in the spelling of transformers 4 (``rope_theta``, ``rope_scaling``) or 5
            (``rope_parameters``).
        partial: Fraction of ``head_dim`` that is rotated; the rest passes through.
    """

    def __init__(self, config: dict[str, Any], partial: float = 1.0) -> None:
        values: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
        self.dim = int(config["head_dim"] * partial)
        self.kind: str = values.get("rope_type", values.get("type", "default"))
        self.theta = float(values.get("rope_theta", config.get("rope_theta", 10000.0)))
        self.context: int = config["max_position_embeddings"]
        self.exponents = np.arange(0, self.dim, 2) / self.dim
        self.inverse = self.theta**-self.exponents
        self.magnitude = 1.0
        original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
        original = original or self.context
        self.factor = float(values.get("factor") or self.context / original)
        match self.kind:
            case "default" | "dynamic":
                pass
            case "linear":
                self.inverse = self.inverse / self.factor
            case "llama3":
                self.inverse = self._llama3(values, original)
            case "yarn":
                self.inverse = self._yarn(values, original)
                self.magnitude = self._yarn_magnitude(values)
            case _:
                raise ValueError(f"unknown rope type {self.kind!r}")

    def _llama3(self, values: dict[str, Any], original: int) -> Array:
        """Long wavelengths are stretched, short ones kept, those between interpolated."""
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        turns = original * self.inverse / (2 * math.pi)  # full rotations within the original context
        share = np.clip((turns - low) / (high - low), 0, 1)
        inverse: Array = share * self.inverse + (1 - share) * self.inverse / self.factor
        return inverse

    def _yarn(self, values: dict[str, Any], original: int) -> Array:
        """A ramp over the dimensions, from extrapolation (fast ones) to interpolation (slow ones)."""

        def dimension(rotations: float) -> float:
            return self.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        first = dimension(values.get("beta_fast") or 32)
        last = dimension(values.get("beta_slow") or 1)
        if values.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        ramp = np.clip((np.arange(self.dim // 2) - first) / max(last - first, 0.001), 0, 1)
        inverse: Array = ramp * self.inverse / self.factor + (1 - ramp) * self.inverse
        return inverse

    def _yarn_magnitude(self, values: dict[str, Any]) -> float:
        def scale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1 if self.factor > 1 else 1.0

        if values.get("attention_factor") is not None:
            return float(values["attention_factor"])
        if values.get("mscale") and values.get("mscale_all_dim"):
            return scale(values["mscale"]) / scale(values["mscale_all_dim"])
        return scale(1.0)

    def rotate(self, heads: Array, positions: NDArray[np.int64], lengths: NDArray[np.int64]) -> Array:
        """Rotate heads ``[n, h, D]``.

        Args:
            positions: Absolute positions ``[n]``.
            lengths: For each token the text's length at the moment it was rotated ``[n]``; only dynamic NTK asks.
        """
        inverse = np.broadcast_to(self.inverse, (len(heads), self.dim // 2))
        if self.kind == "dynamic":
            stretch = self.factor * np.maximum(lengths, self.context) / self.context - (self.factor - 1)
            base = self.theta * stretch ** (self.dim / (self.dim - 2))
            inverse = base[:, None] ** -self.exponents
        angles = positions[:, None, None] * inverse[:, None, :]
        cos, sin = np.cos(angles) * self.magnitude, np.sin(angles) * self.magnitude
        low, high, rest = np.split(heads, [self.dim // 2, self.dim], axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)
