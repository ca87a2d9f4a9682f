"""The distribution that sampling options make: written for reading in float64, and the one of the runtime."""

import math
from collections.abc import Sequence

import numpy as np

from dspark.runtime.decoding.distribution import shaped
from dspark.runtime.decoding.penalties import Penalties
from dspark.runtime.decoding.sampling_params import SamplingParams

__all__ = ["distribution", "reference"]


def reference(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int] = (), generated: Sequence[int] = ()
) -> np.ndarray:
    """The target's distribution in float64, one rule after the other, written for reading."""
    x = [float(value) for value in logits]
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *generated}:
        x[token] = x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
    for token in set(generated):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(generated).count(token)
    ranking = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.temperature < 1e-5:
        ranking = ranking[:1]
    if params.top_k:
        ranking = ranking[: params.top_k]
    temperature = max(params.temperature, 1e-5)
    weights = {token: math.exp((x[token] - x[ranking[0]]) / temperature) for token in ranking}
    total, before, nucleus = sum(weights.values()), 0.0, {}
    for token in ranking:
        if before / total < params.top_p:
            nucleus[token] = weights[token]
        before += weights[token]
    kept = {token: weight for token, weight in nucleus.items() if weight >= params.min_p}
    p = np.zeros(len(x))
    p[list(kept)] = np.array(list(kept.values())) / sum(kept.values())
    return p


def distribution(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int] = (), generated: Sequence[int] = ()
) -> np.ndarray:
    penalties = Penalties(params, prompt, len(logits))
    for token in generated:
        penalties.record(token)
    return shaped(penalties.apply(logits), params).dense(len(logits))
