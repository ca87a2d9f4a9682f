"""Rotary position embedding: from a configuration's words to numbers.

The types, their keys and their float32 arithmetic are those of transformers (``modeling_rope_utils``), so that a
rotation differs from the reference's by no more than the rounding of one power function. Su et al., "RoFormer", 2021;
Peng et al., "YaRN", 2023, sections 3.1 to 3.4.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from dspark.exporter.checkpoints.description import DynamicScaling, Rope
from dspark.exporter.checkpoints.validation import ConfigModel, validated
from dspark.exporter.errors import CheckpointError

__all__ = ["context_length", "resolve_rope"]

Frequencies = NDArray[np.float32]


def resolve_rope(config: Mapping[str, Any], head_dim: int, where: str = "config.json") -> Rope:
    """Resolves a configuration's rotary embedding.

    Args:
        config: In the spelling of transformers 4 (``rope_theta``, ``rope_scaling`` with ``type`` or ``rope_type``) or 5
            (``rope_parameters``).
        head_dim: Width of an attention head.
        where: What to call the configuration in messages.

    Raises:
        CheckpointError: If the type is unknown, a key is unknown, missing or wrong, or two spellings contradict.
    """
    rotary = _read(config, where)
    dim = int(head_dim * rotary.partial_rotary_factor)
    if dim < 2 or dim % 2:
        raise CheckpointError(
            f"{where}: partial_rotary_factor = {rotary.partial_rotary_factor} rotates {dim} of {head_dim} dimensions; "
            "an even number is needed."
        )
    return rotary.resolve(dim)


def context_length(config: Mapping[str, Any], where: str = "config.json") -> int:
    """Longest text in tokens that a configuration's rotary embedding is made for, scaling included.

    ``max_position_embeddings`` already includes llama3's factor, but not the factor of linear and dynamic scaling;
    YaRN's applies to ``original_max_position_embeddings``. vLLM reads them so, too.

    Raises:
        CheckpointError: As ``resolve_rope``.
    """
    return _read(config, where).context_length


class _Rotary(ConfigModel, ABC):
    """What all types have in common."""

    model_config = ConfigDict(extra="forbid")

    rope_theta: Annotated[float, Field(gt=1)] = 10000.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_position_embeddings: PositiveInt

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings

    @abstractmethod
    def resolve(self, dim: int) -> Rope:
        """Numbers for ``dim`` rotated dimensions."""

    def _powers(self, dim: int) -> Frequencies:
        """``theta ^ (2i / d)``: exponents in float32, the power itself rounded once."""
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        return np.power(self.rope_theta, exponents.astype(np.float64)).astype(np.float32)


class _Unscaled(_Rotary):
    """Rotary embedding as it was first described."""

    def resolve(self, dim: int) -> Rope:
        return _rope(_inverse(self._powers(dim)))


class _Linear(_Rotary):
    """Positions divided by a factor."""

    factor: PositiveFloat

    @property
    def context_length(self) -> int:
        return int(self.max_position_embeddings * self.factor)

    def resolve(self, dim: int) -> Rope:
        return _rope(_inverse(self._powers(dim)) / np.float32(self.factor))


class _Dynamic(_Rotary):
    """A base that grows with the text; at rest it is the unscaled one."""

    factor: PositiveFloat

    @property
    def context_length(self) -> int:
        return int(self.max_position_embeddings * self.factor)

    def resolve(self, dim: int) -> Rope:
        if dim == 2:
            raise CheckpointError("dynamic RoPE scaling needs more than 2 rotated dimensions.")
        scaling = DynamicScaling(self.rope_theta, self.factor, self.max_position_embeddings)
        return _rope(_inverse(self._powers(dim)), dynamic=scaling)


class _Pretrained(_Rotary):
    """Types that know the length the model was first trained on."""

    original_max_position_embeddings: PositiveInt | None = None

    @property
    def original_length(self) -> int:
        return self.original_max_position_embeddings or self.max_position_embeddings


class _Llama3(_Pretrained):
    """Long wavelengths divided by a factor, short ones kept, a smooth passage between."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat

    @model_validator(mode="after")
    def _factors_differ(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be greater than low_freq_factor")
        return self

    def resolve(self, dim: int) -> Rope:
        kept = _inverse(self._powers(dim))
        divided = kept / np.float32(self.factor)
        wavelengths = np.float32(2 * math.pi) / kept
        longest = self.original_length / self.low_freq_factor
        shortest = self.original_length / self.high_freq_factor
        turns = np.float32(self.original_length) / wavelengths
        share = (turns - self.low_freq_factor) / np.float32(self.high_freq_factor - self.low_freq_factor)
        blended = (1 - share) * kept / np.float32(self.factor) + share * kept
        frequencies = np.where(wavelengths > longest, divided, np.where(wavelengths < shortest, kept, blended))
        return _rope(frequencies)


class _Yarn(_Pretrained):
    """Fast dimensions extrapolated, slow ones interpolated, attention made a little sharper."""

    factor: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    finetuned: bool = True  # a remark that the first YaRN checkpoints carry

    @property
    def ratio(self) -> float:
        return self.factor or self.max_position_embeddings / self.original_length

    @property
    def context_length(self) -> int:
        return int(self.original_length * self.ratio)

    def resolve(self, dim: int) -> Rope:
        powers = self._powers(dim)
        low, high = self._ramp_ends(dim)
        ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
        extrapolated = 1 - ramp
        interpolated = _inverse(np.float32(self.ratio) * powers)
        return _rope(interpolated * (1 - extrapolated) + _inverse(powers) * extrapolated, self._magnitude())

    def _ramp_ends(self, dim: int) -> tuple[float, float]:
        """The rotated pairs that turn ``beta_fast`` and ``beta_slow`` times within the original length."""

        def pair(rotations: float) -> float:
            return dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(self.rope_theta))

        low, high = pair(self.beta_fast or 32), pair(self.beta_slow or 1)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return (low, high + 0.001) if low == high else (low, high)

    def _magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)
        return self._sharpening(1.0)

    def _sharpening(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.ratio) + 1.0 if self.ratio > 1 else 1.0


_TYPES: dict[str, type[_Rotary]] = {
    "default": _Unscaled,
    "linear": _Linear,
    "dynamic": _Dynamic,
    "llama3": _Llama3,
    "yarn": _Yarn,
}


def _read(config: Mapping[str, Any], where: str) -> _Rotary:
    values = _merge(config, where)
    kind = values.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise CheckpointError(f"{where}: RoPE type {kind!r} is not supported; supported are {', '.join(_TYPES)}.")
    original = config.get("original_max_position_embeddings")
    if issubclass(_TYPES[kind], _Pretrained) and original is not None:  # some files have it at top level
        values.setdefault("original_max_position_embeddings", original)
    return validated(_TYPES[kind], values, f"{where}: RoPE of type {kind}")


def _merge(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The rotary keys of all spellings in one; two spellings of one key must agree."""
    found = [(key, key, config.get(key)) for key in ("rope_theta", "partial_rotary_factor", "max_position_embeddings")]
    for spelling in ("rope_scaling", "rope_parameters"):
        parameters = config.get(spelling) or {}
        if not isinstance(parameters, Mapping):
            raise CheckpointError(f"{where}: {spelling} = {parameters!r}; an object is needed.")
        for key, value in parameters.items():
            if isinstance(value, Mapping):
                raise CheckpointError(f"{where}: {spelling}.{key} is for some layers only, which is not supported.")
            found.append(("rope_type" if key == "type" else key, f"{spelling}.{key}", value))
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, spelling, value in found:
        if value is None:
            continue
        if key in values and values[key] != value:
            raise CheckpointError(f"{where}: {spelled[key]} = {values[key]!r} contradicts {spelling} = {value!r}.")
        values[key], spelled[key] = value, spelling
    return values


def _inverse(powers: Frequencies) -> Frequencies:
    return np.float32(1) / powers


def _rope(frequencies: Frequencies, magnitude: float = 1.0, dynamic: DynamicScaling | None = None) -> Rope:
    return Rope(tuple(frequencies.astype(np.float32).tolist()), magnitude, dynamic)
