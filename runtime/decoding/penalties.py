"""Logit bias and penalties: how a request's own tokens change its logits."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.errors import RequestError

__all__ = ["Penalties"]

Logits: TypeAlias = npt.NDArray[np.float32]


class Penalties:
    """Logit bias and repetition, presence and frequency penalties of one request, with the counts they depend on.

    Args:
        params: The request's options.
        prompt_ids: The prompt; only the repetition penalty looks at it.
        vocabulary_size: V.

    Attributes:
        active: Whether anything changes.

    Raises:
        RequestError: A biased token id is outside the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int] | npt.NDArray[np.int64], vocabulary_size: int
    ) -> None:
        if (highest := max(params.logit_bias, default=0)) >= vocabulary_size:
            raise RequestError(f"logit_bias names token {highest}; the vocabulary ends at {vocabulary_size - 1}")
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        penalised = (self._repetition, self._presence, self._frequency) != (1.0, 0.0, 0.0)
        self.active = penalised or bool(params.logit_bias)
        if self.active:
            self._bias = np.zeros(vocabulary_size)
            self._bias[list(params.logit_bias)] = list(params.logit_bias.values())
            self._generated = np.zeros(vocabulary_size, np.int64)
            self._seen = np.zeros(vocabulary_size, np.bool_)
            self._seen[np.asarray(prompt_ids, np.int64)] = True

    def record(self, token: int) -> None:
        """Counts a generated token."""
        if self.active:
            self._generated[token] += 1
            self._seen[token] = True

    def apply(self, logits: Logits) -> Logits:
        """Returns the row ``[V]`` as the tokens recorded so far change it; the argument stays as it is."""
        if not self.active:
            return logits
        touched = np.flatnonzero(self._seen | (self._bias != 0))
        values = logits[touched] + self._bias[touched]
        repeated = np.where(values < 0, values * self._repetition, values / self._repetition)
        values = np.where(self._seen[touched], repeated, values)
        generated = self._generated[touched]
        values -= self._presence * (generated > 0) + self._frequency * generated
        limit = np.finfo(np.float32).max
        penalised = logits.copy()
        penalised[touched] = np.clip(values, -limit, limit)
        return penalised
