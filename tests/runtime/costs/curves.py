"""Curves of cost tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark.runtime.costs.model import CostModel
from dspark.runtime.costs.table import CostTable

__all__ = ["drafts", "even_steps"]


def drafts(requests: list[int], rates: Sequence[float] = (1, 1, 1, 1), context: int = 128) -> dict[str, list[Any]]:
    curve = {"context_length": context, "sample_requests": requests, "sample_drafts_per_sec": [*rates]}
    return {"draft_curves": [curve]}


def even_steps(table: CostTable, requests: int, context: int, draft_tokens: int) -> np.ndarray:
    """Time of steps in which all requests verify equally many of 0, 1, … draft tokens, as far as that goes."""
    counts = np.arange(draft_tokens + 1)
    return CostModel(table).step_seconds(requests, context, counts, 1 + counts // requests)
