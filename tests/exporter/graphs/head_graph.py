"""A head's graph, and what tests of it compute."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.graph_host import open_graph

__all__ = ["HIDDEN", "SLOTS", "Array", "Head", "draft_ids", "probabilities"]

Array = NDArray[Any]
SLOTS = 3
HIDDEN = 8


class Head:
    """A head's graph and what its vocabulary is."""

    def __init__(self, bundle: Path) -> None:
        self.session = open_graph(bundle, "head")
        shapes = {each.name: each.shape for each in self.session.get_inputs()}
        self.vocabulary = shapes["base_logits"][2]
        table = bundle / "draft_vocabulary.npy"
        self.target_ids = np.load(table) if table.is_file() else np.arange(self.vocabulary)

    def run(self, logits: Array, uniform: Array, temperature: Array, **feeds: Array) -> dict[str, Array]:
        """The outputs for base logits ``[B, γ, V']`` and hidden states of zero."""
        batch = len(logits)
        inputs = {
            "hidden": np.zeros((batch, SLOTS, HIDDEN)),
            "base_logits": logits,
            "uniform": uniform,
            "temperature": temperature,
        } | feeds
        inputs = {name: np.ascontiguousarray(array, np.float32) for name, array in inputs.items()}
        inputs["anchor_ids"] = np.asarray(feeds.get("anchor_ids", np.zeros(batch)), np.int64)
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, inputs), strict=True))


def probabilities(logits: Array, temperature: Array) -> Array:
    """``softmax(logits / temperature)`` of ``[B, …, V']`` with one temperature per row, in float64."""
    scaled = logits.astype(np.float64) / temperature.reshape(-1, *[1] * (logits.ndim - 1))
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def draft_ids(head: Head, tokens: Array) -> Array:
    """Draft ids of target ids, which must be in the draft vocabulary."""
    assert np.isin(tokens, head.target_ids).all()
    return np.searchsorted(head.target_ids, tokens)
