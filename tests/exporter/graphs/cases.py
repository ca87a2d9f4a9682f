"""Drafters of every kind that makes a difference to the inputs and outputs of graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoints import write_deepspec, write_eagle3, write_speculators, write_zlab_dflash

__all__ = ["CASES", "DYNAMIC"]

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
CASES: dict[str, tuple[Callable[..., Path], dict[str, Any], dict[str, Any]]] = {
    "rnn": (write_deepspec, {}, {}),
    "no-head": (write_deepspec, {"head": "none", "confidence": "none"}, {}),
    "no-confidence": (write_deepspec, {"head": "gated", "confidence": "none"}, {}),
    "one-slot": (write_deepspec, {"block_size": 1}, {}),
    "anchor-predicts-nothing": (write_zlab_dflash, {}, {}),
    "reduced-vocabulary": (write_speculators, {"draft_vocab": 50}, {}),
    "top-k": (write_deepspec, {}, {"draft_top_k": 8}),
    "top-k-of-a-reduced-vocabulary": (write_speculators, {"draft_vocab": 50}, {"draft_top_k": 8}),
    "eagle3": (write_eagle3, {"steps": 3}, {}),
    "eagle3-reduced-vocabulary": (write_eagle3, {"draft_vocab": 60}, {}),
}
"""The writer of a checkpoint, its options, and those of the export."""
