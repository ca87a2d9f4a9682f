"""What any round costs, by interpolation in a table."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.costs.table import CostTable, StepCurve

__all__ = ["CostModel"]

Floats = NDArray[np.float64]


class CostModel:
    """What any round costs, by interpolation in a table.

    Between numbers of requests it interpolates at equally many tokens per request. Attention's time is linear in the
    context, so that what context costs is taken from steps of one request. Attention computes each request of a step
    as if it were the longest, while those that were measured were equally long.

    Args:
        table: The measurements.
    """

    def __init__(self, table: CostTable) -> None:
        near_drafts, far_drafts = table.draft_curves[0], table.draft_curves[-1]
        self._drafts = np.array(near_drafts.sample_requests), 1 / np.array(near_drafts.sample_drafts_per_sec)
        self._draft_context = near_drafts.context_length
        slower = 1 / far_drafts.sample_drafts_per_sec[0] - 1 / near_drafts.sample_drafts_per_sec[0]
        self._draft_slope = max(slower, 0) / max(far_drafts.context_length - near_drafts.context_length, 1)
        self._context = min(curve.context_length for curve in table.curves)
        self._rows = {
            curve.requests: _per_request(curve)
            for curve in sorted(table.curves, key=lambda curve: curve.requests)
            if curve.context_length == self._context
        }
        self._least = min(seconds[0] for _, seconds in self._rows.values())
        tokens, near = self._rows[1]
        last = max((curve for curve in table.curves if curve.requests == 1), key=lambda curve: curve.context_length)
        rise = np.maximum.accumulate(np.maximum(_per_request(last)[1] - near, 0))
        slope = rise / max(last.context_length - self._context, 1)
        self._slopes = np.interp(np.arange(tokens[-1] + 1), tokens, slope)
        self._linear = lru_cache(64)(self._without_attention)
        self._draft = lru_cache(64)(lambda requests: float(np.interp(requests, *self._drafts)))

    def step_seconds(
        self, requests: int, context_length: int, draft_tokens: NDArray[np.int64], longest: NDArray[np.int64]
    ) -> Floats:
        """Time ``[n]`` of steps that verify so many draft tokens beside each request's anchor.

        Args:
            requests: R.
            context_length: Cached tokens that attention reads of each request.
            draft_tokens: Draft tokens that all requests verify together, int64 ``[n]``.
            longest: Most tokens of one request, its anchor included, int64 ``[n]``.
        """
        linear = self._linear(requests, int(draft_tokens.max()))[draft_tokens]
        seconds = linear + requests * max(context_length, self._context) * self._attention(longest)
        return np.asarray(np.maximum(seconds, self._least))  # a sum of large parts that nearly cancel each other

    def draft_seconds(self, requests: int, context_length: int) -> float:
        """Time of drafting for so many requests, of each of which attention reads so many cached tokens."""
        return self._draft(requests) + requests * max(context_length - self._draft_context, 0) * self._draft_slope

    def _without_attention(self, requests: int, draft_tokens: int) -> Floats:
        """Time ``[draft_tokens + 1]`` of steps that verify 0, 1, … draft tokens, but for reading the context."""
        tokens = 1 + np.arange(draft_tokens + 1) / requests  # of each request
        measured = np.array(list(self._rows))
        place = float(np.interp(requests, measured, np.arange(len(measured))))
        below, above = (
            np.interp(tokens, *self._rows[int(measured[index])]) for index in (int(place), int(np.ceil(place)))
        )
        seconds = below + (place - int(place)) * (above - below)
        return np.asarray(np.maximum.accumulate(seconds - requests * self._context * self._attention(tokens)))

    def _attention(self, tokens: NDArray[np.int64] | Floats) -> Floats:
        """Time of reading a token of context with so many tokens of a request."""
        if tokens.dtype.kind == "i":  # looked up: searches ask for thousands at once
            return np.asarray(self._slopes[np.minimum(tokens, len(self._slopes) - 1)])
        return np.asarray(np.interp(tokens, np.arange(len(self._slopes)), self._slopes))


def _per_request(curve: StepCurve) -> tuple[Floats, Floats]:
    """Tokens a request, and the step's seconds made monotone: a step cannot take less time for more tokens."""
    seconds = 1 / np.array(curve.sample_steps_per_sec)
    rising = np.maximum.accumulate(seconds) + np.minimum.accumulate(seconds[::-1])[::-1]
    return np.array(curve.sample_batch_tokens) / curve.requests, rising / 2
