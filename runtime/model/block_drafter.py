"""DSpark and DFlash: one pass drafts a block, one call of the head samples it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.providers.session import Call, Session
from dspark.runtime.bundle.contract import CANDIDATES, MASKED, context_names
from dspark.runtime.bundle.manifest import DrafterInfo, HeadInfo
from dspark.runtime.cache.allocation import common_allocator
from dspark.runtime.cache.key_value_cache import DRAFT, KeyValueCache
from dspark.runtime.model.bound_calls import BoundCalls, buffer_bytes
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.draft_buffers import SampledBuffers, fetches_logits
from dspark.runtime.model.drafter import DraftInput, Proposal
from dspark.runtime.model.masks import past_bias
from dspark.runtime.model.target import Verification

__all__ = ["BlockDrafter"]


class BlockDrafter:
    """DSpark and DFlash: one pass drafts the block, one call of the head samples it.

    Args:
        session: The drafter's graph.
        head_session: The head's graph.
        info: The drafter's description.
        head: The head's description.
        vocabulary: Target ids of a reduced draft vocabulary, int64 ``[V']``.
        cache: Holds the context rows that the target computes.
        clock: Tells the time spent in each graph.
        batch: Requests that every draft is for, padding included; None if any number.
    """

    def __init__(
        self,
        session: Session,
        head_session: Session,
        info: DrafterInfo,
        head: HeadInfo,
        vocabulary: NDArray[np.int64] | None,
        cache: KeyValueCache,
        clock: PhaseClock,
        batch: int | None = None,
    ) -> None:
        self._session = session
        self._batch = batch
        self._head_session = head_session
        self._info = info
        self._head = head
        self._vocabulary = vocabulary
        self._cache = cache
        self._clock = clock
        self._blocks = BoundCalls(cache, self._bind)
        self._blocks.get(batch or 1, True)  # shows now if these are other graphs

    def begin(self, slot: int) -> None:
        """Nothing to do: all context is in the cache's slot."""

    def commit(self, slot: int, verification: Verification, index: int, following: Sequence[int]) -> None:
        """Nothing to do: the target commits the context rows with its own."""

    def move(self, slot: int, source: int) -> None:
        """Nothing to do: the context moves with the cache's slot."""

    def draft(self, inputs: Sequence[DraftInput]) -> Proposal:
        """Drafts a block for the requests in slots 0…R − 1."""
        requests = len(inputs)
        logits = fetches_logits(self._head_session, inputs)
        block = self._blocks.get(requests if self._batch is None else self._batch, logits)
        lengths = self._cache.lengths[DRAFT, :requests]
        block.inputs["anchor_ids"][:requests] = [item.anchor for item in inputs]
        block.inputs["anchor_positions"][:requests] = lengths
        block.inputs["context_bias"][:requests] = past_bias(lengths, self._cache.capacity)
        block.inputs["context_bias"][requests:] = MASKED
        block.sampled.fill(inputs)
        with self._clock.phase("draft"):
            block.drafter.run()
        with self._clock.phase("head"):
            block.head.run()
        return block.sampled.proposal(requests)

    def _bind(self, requests: int, logits: bool) -> "_Block":
        info, capacity = self._info, self._cache.capacity
        inputs: dict[str, NDArray[Any]] = {
            "anchor_ids": np.zeros(requests, np.int64),
            "anchor_positions": np.zeros(requests, np.int64),
            "context_bias": np.zeros((requests, 1, 1, 1, capacity), np.float32),
        }
        context = dict(inputs)
        for index, arrays in enumerate(self._cache.layers(DRAFT, slice(0, requests))):
            context.update(zip(context_names(index), arrays, strict=True))
        zeros = common_allocator([self._session, self._head_session], np.zeros)  # the host does not look at these
        drafted: dict[str, NDArray[Any]] = {
            "hidden": zeros((requests, info.draft_length, info.hidden_size), np.float32),
            "base_logits": zeros((requests, info.draft_length, info.choices), np.float32),
        }
        if info.top_k is not None:
            drafted[CANDIDATES] = zeros((requests, info.draft_length, info.top_k), np.int64)
        confidence = self._head.confidence != "none"
        sampled = SampledBuffers(info, self._vocabulary, requests, logits=logits, confidence=confidence)
        head_inputs = {**drafted, "anchor_ids": inputs["anchor_ids"], **sampled.inputs}
        return _Block(
            drafter=self._session.bind(context, drafted),
            head=self._head_session.bind(head_inputs, sampled.outputs),
            inputs=inputs,
            sampled=sampled,
            nbytes=buffer_bytes(inputs, drafted, sampled.inputs, sampled.outputs),
        )


@dataclass(frozen=True)
class _Block:
    """Bound calls of drafter and head for one number of requests."""

    drafter: Call
    head: Call
    inputs: dict[str, NDArray[Any]]
    sampled: SampledBuffers
    nbytes: int
