"""From logits to the distributions p and q that the accept rule compares."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dspark.runtime.decoding.finite import require_finite
from dspark.runtime.decoding.sampling_params import SamplingParams

__all__ = ["Distribution", "proposed", "shaped"]

Logits: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.int64]

_ONE = np.ones(1)


class Distribution:
    """Unnormalised weights of token ids.

    Attributes:
        weights: ``[n]``, at least 0 each and not all 0.
        ids: ``[n]`` the weights' distinct token ids; None when weight i belongs to token i.
        total: The weights' sum, in float64.
    """

    __slots__ = ("ids", "total", "weights")

    def __init__(
        self, weights: npt.NDArray[np.floating[Any]], ids: Ids | None = None, total: float | None = None
    ) -> None:
        self.weights = weights
        self.ids = ids
        self.total = float(weights.sum(dtype=np.float64)) if total is None else total

    @classmethod
    def point(cls, token: int) -> "Distribution":
        """All mass on one token."""
        return cls(_ONE, np.array([token]), 1.0)

    def only(self, kept: Ids) -> "Distribution":
        """The restriction to the entries at the positions ``kept``."""
        return Distribution(self.weights[kept], kept if self.ids is None else self.ids[kept])

    def probability(self, token: int) -> float:
        """The probability of one token id; 0 outside ``ids``."""
        weight = self.weights[token] if self.ids is None else self.weights[self.ids == token].sum()
        return float(weight) / self.total

    def dense(self, size: int) -> npt.NDArray[np.float64]:
        """The probabilities of the ids 0…size − 1, ``[size]``."""
        probabilities = self.weights.astype(np.float64) / self.total
        if self.ids is None:
            return probabilities
        dense = np.zeros(size)
        dense[self.ids] = probabilities
        return dense

    def draw(self, uniform: float) -> int:
        """The token at which the cumulative distribution passes ``uniform`` (in [0, 1))."""
        if self.ids is not None and len(self.ids) == 1:
            return int(self.ids[0])
        cumulative = np.cumsum(self.weights, dtype=np.float64)
        position = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
        # Rounding may lift the target onto the last value; the first entry that reaches it has weight.
        position = min(position, np.searchsorted(cumulative, cumulative[-1], side="left"))
        return int(position if self.ids is None else self.ids[position])


def shaped(logits: Logits, params: SamplingParams) -> Distribution:
    """The target's distribution p after temperature, top-k, top-p and min-p.

    Args:
        logits: ``[V]`` finite logits, penalties applied.
        params: The request's options.

    Returns:
        p; all mass on the largest logit when decoding is greedy. Of equal logits the lowest ids go first.
    """
    if params.greedy:
        return Distribution.point(int(logits.argmax()))
    with np.errstate(over="ignore"):  # a token ruled out by its bias falls to -inf: weight 0
        scaled = logits - logits.max()
        if params.temperature != 1:
            scaled /= np.float32(params.temperature)
    kept = None
    if 0 < params.top_k < len(scaled):
        kept = _largest(scaled, params.top_k, np.partition(scaled, -params.top_k)[-params.top_k])
        scaled = scaled[kept]
    p = Distribution(np.exp(scaled, out=scaled), kept)
    if params.top_p < 1:
        p = p.only(_nucleus(p, params.top_p))
    if params.min_p > 0:  # the likeliest token has weight exp(0) = 1
        p = p.only(np.flatnonzero(p.weights >= params.min_p))
    return p


def proposed(logits: Logits, temperature: float, ids: Ids | None, name: str) -> Distribution:
    """The draft distribution q = softmax(logits / temperature), computed as the head graph computes it.

    Args:
        logits: ``[K]`` the row the draft token was drawn from.
        temperature: The temperature it was drawn with, above 0.
        ids: ``[K]`` target ids of the logits; None when logit i is of token i.
        name: What the row is, for the error.

    Raises:
        NumericalError: The row holds a NaN or an infinity.
    """
    scaled = logits if temperature == 1 else logits / np.float32(temperature)
    require_finite(scaled, name)
    return Distribution(np.exp(scaled - scaled.max()), ids)


def _nucleus(p: Distribution, mass: float) -> Ids:
    """Ascending positions of the fewest largest weights that hold ``mass``."""
    # All weights under this bound together hold less than 1 - mass: they are never needed, so never sorted.
    bound = (1 - mass) * p.total / len(p.weights)
    descending = np.sort(p.weights[p.weights >= bound])[::-1]
    before = np.searchsorted(np.cumsum(descending, dtype=np.float64), mass * p.total)
    count = min(int(before) + 1, len(descending))
    return _largest(p.weights, count, descending[count - 1])


def _largest(values: npt.NDArray[Any], count: int, smallest: np.floating[Any]) -> Ids:
    """Ascending positions of the ``count`` largest values, down to ``smallest``; of equal ones the first."""
    above = np.flatnonzero(values > smallest)
    tied = np.flatnonzero(values == smallest)[: count - len(above)]
    return np.sort(np.concatenate((above, tied)))
