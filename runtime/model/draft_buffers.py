"""Buffers of the graphs that sample draft tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.runtime.bundle.contract import DRAFT_IDS
from dspark.runtime.bundle.manifest import DrafterInfo
from dspark.runtime.model.drafter import DraftInput, Proposal

__all__ = ["SampledBuffers"]


class SampledBuffers:
    """Buffers that every graph which samples shares."""

    def __init__(
        self, info: DrafterInfo, vocabulary: NDArray[np.int64] | None, requests: int, *, logits: bool, confidence: bool
    ) -> None:
        length = info.draft_length
        shape = (requests, length, info.choices)
        self.inputs: dict[str, NDArray[Any]] = {
            "uniform": np.zeros((requests, length), np.float32),
            "temperature": np.zeros(requests, np.float32),
        }
        self.tokens = np.zeros((requests, length), np.int64)
        self.confidence = np.zeros((requests, length), np.float32) if confidence else None
        self.outputs: dict[str, NDArray[Any]] = {"tokens": self.tokens}
        self.logits: NDArray[np.float32] | None = None
        self.ids: NDArray[np.int64] | None = None
        if logits:
            self.logits = self.outputs["draft_logits"] = np.zeros(shape, np.float32)
            if info.top_k is not None:
                self.ids = self.outputs[DRAFT_IDS] = np.zeros(shape, np.int64)
            elif vocabulary is not None:
                self.ids = np.broadcast_to(vocabulary, shape)
        if self.confidence is not None:
            self.outputs["confidence"] = self.confidence

    def fill(self, inputs: Sequence[DraftInput]) -> None:
        """Writes random numbers and temperatures."""
        self.inputs["uniform"][: len(inputs)] = [item.uniforms for item in inputs]
        self.inputs["temperature"][: len(inputs)] = [item.temperature for item in inputs]

    def proposal(self, requests: int) -> Proposal:
        """The draft of the first ``requests`` requests."""
        first = slice(0, requests)
        logits = None if self.logits is None else self.logits[first]
        ids = None if self.ids is None else self.ids[first]
        confidence = None if self.confidence is None else self.confidence[first]
        return Proposal(self.tokens[first], logits, ids, confidence)
