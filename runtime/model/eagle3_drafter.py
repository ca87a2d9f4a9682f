"""EAGLE-3: drafts token by token inside one graph call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.providers.session import Call, Session, limits_of
from dspark.runtime.bundle.contract import MASKED, context_names, delta_names
from dspark.runtime.bundle.manifest import DrafterInfo, StaticShapes
from dspark.runtime.cache.key_value_cache import DRAFT, KeyValueCache
from dspark.runtime.model.bound_calls import BoundCalls, buffer_bytes
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.draft_buffers import SampledBuffers, fetches_logits
from dspark.runtime.model.drafter import DraftInput, Proposal
from dspark.runtime.model.masks import causal_bias, new_rows, past_bias
from dspark.runtime.model.target import Verification

__all__ = ["EXTENSION", "Eagle3Drafter"]

EXTENSION = 256
"""Committed tokens that an EAGLE-3 drafter takes at once, which bounds its attention's memory."""


class _Pending:
    """Committed tokens of a request that an EAGLE-3 drafter has not taken yet.

    Args:
        allocate: Makes arrays of zeros where features lie.
        width: Values per feature (H).

    Attributes:
        following: The token after each of them.
    """

    def __init__(self, allocate: Callable[..., Any], width: int) -> None:
        self.following: list[int] = []
        self._allocate = allocate
        self._width = width
        self._features: Any = None
        self._first = 0

    def add(self, features: Any, following: Sequence[int]) -> None:
        """Keeps features ``[n, H]`` and the token after each."""
        end = self._first + len(self.following)
        if self._features is None or end + len(following) > self._features.shape[0]:
            former, first = self._features, self._first
            self._features = self._allocate((2 * (len(self.following) + len(following)), self._width), np.float32)
            if self.following:
                self._features[: len(self.following)] = former[first:end]
            self._first, end = 0, len(self.following)
        self._features[end : end + len(following)] = features
        self.following.extend(following)

    def take(self, count: int, ids: NDArray[np.int64], features: Any, index: int) -> None:
        """Moves the oldest ones into ``ids [T]`` and ``features [B, T, H]`` of request ``index``."""
        ids[:count] = self.following[:count]
        features[index, :count] = self._features[self._first : self._first + count]
        del self.following[:count]
        self._first = self._first + count if self.following else 0


class Eagle3Drafter:
    """EAGLE-3: extends its cache with committed tokens and drafts token by token, all in one graph call.

    Args:
        session: The drafter's graph.
        info: The drafter's description.
        vocabulary: Target ids of a reduced draft vocabulary, int64 ``[V']``.
        cache: Holds the drafter's own keys and values.
        clock: Tells the time spent in the graph.
        shapes: The only shapes of its calls; None if any will do.
        allocate_features: Makes arrays of zeros where the target leaves its features.
    """

    def __init__(
        self,
        session: Session,
        info: DrafterInfo,
        vocabulary: NDArray[np.int64] | None,
        cache: KeyValueCache,
        clock: PhaseClock,
        shapes: StaticShapes | None = None,
        allocate_features: Callable[..., Any] = np.zeros,
    ) -> None:
        self._session = session
        self._shapes = shapes
        self._allocate_features = allocate_features
        self._most = min(EXTENSION, limits_of(session).prompt_tokens or EXTENSION)
        self._info = info
        self._vocabulary = vocabulary
        self._cache = cache
        self._clock = clock
        self._extensions = BoundCalls(cache, self._bind)
        # Shows now if this is another graph.
        self._extensions.get(0, *((1, 1) if shapes is None else (shapes.batch, shapes.block)), True)
        self._pending: dict[int, _Pending] = {}

    def begin(self, slot: int) -> None:
        """Forgets what the slot's last request left."""
        self._pending[slot] = _Pending(self._allocate_features, self._info.hidden_size)

    def commit(self, slot: int, verification: Verification, index: int, following: Sequence[int]) -> None:
        """Keeps the features of committed tokens, each paired with the token after it, for the next proposal."""
        assert verification.features is not None
        start = verification.offsets[index]
        self._pending[slot].add(verification.features[start : start + len(following)], following)

    def move(self, slot: int, source: int) -> None:
        """Follows a request that moved from one slot to another."""
        self._pending[slot] = self._pending.pop(source)

    def draft(self, inputs: Sequence[DraftInput]) -> Proposal:
        """Drafts a block for the requests in slots 0…R − 1."""
        shapes = self._shapes
        most, final = (self._most, self._most) if shapes is None else (shapes.chunk, shapes.block)
        for slot, item in enumerate(inputs):
            while (pending := len(self._pending[slot].following)) > final:
                self._extend(slot, [item], min(most, pending - 1), None if shapes is None else (1, shapes.chunk))
        return self._extend(0, inputs, final, None if shapes is None else (shapes.batch, shapes.block))

    def _extend(
        self, first_slot: int, inputs: Sequence[DraftInput], most: int, fixed: tuple[int, int] | None
    ) -> Proposal:
        """Takes up to ``most`` pending tokens of each request into the cache and drafts after the last.

        ``fixed`` are the requests and tokens that the graph computes, padding included; None for no padding.
        """
        slots = range(first_slot, first_slot + len(inputs))
        counts = [min(len(self._pending[slot].following), most) for slot in slots]
        requests = len(counts)
        logits = fetches_logits(self._session, inputs)
        extension = self._extensions.get(first_slot, *(fixed or (requests, max(counts))), logits)
        lengths = self._cache.lengths[DRAFT, slots]
        buffers = extension.inputs
        width = buffers["input_ids"].shape[1]
        for index, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            self._pending[slot].take(count, buffers["input_ids"][index], extension.features, index)
        buffers["position_ids"][:requests] = lengths[:, None] + np.arange(width)
        buffers["last_index"][:requests] = np.subtract(counts, 1)
        past = buffers["attention_bias"][..., :-width]
        past[:requests] = past_bias(lengths, self._cache.capacity)
        past[requests:] = MASKED
        extension.sampled.fill(inputs)
        with self._clock.phase("draft"):
            extension.call.run()
        for index, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            self._cache.append(DRAFT, slot, extension.rows[:, :, index, :, :count])
        return extension.sampled.proposal(requests)

    def _bind(self, first_slot: int, requests: int, width: int, logits: bool) -> "_Extension":
        features = self._allocate_features((requests, width, self._info.hidden_size), np.float32)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros((requests, width), np.int64),
            "position_ids": np.zeros((requests, width), np.int64),
            "last_index": np.zeros(requests, np.int64),
            "attention_bias": causal_bias(requests, width, self._cache.capacity),
        }
        sampled = SampledBuffers(self._info, self._vocabulary, requests, logits=logits, confidence=False)
        bound = {**inputs, **sampled.inputs, "features": features}
        for index, arrays in enumerate(self._cache.layers(DRAFT, slice(first_slot, first_slot + requests))):
            bound.update(zip(context_names(index), arrays, strict=True))
        rows = new_rows(self._info.cache, requests, width)
        outputs = dict(sampled.outputs)
        for index, layer in enumerate(rows):
            outputs.update(zip(delta_names(index), layer, strict=True))
        nbytes = features.nbytes + buffer_bytes(inputs, sampled.inputs, outputs)
        return _Extension(self._session.bind(bound, outputs), inputs, features, sampled, rows, nbytes)


@dataclass(frozen=True)
class _Extension:
    """A bound call for one shape of extension, with its buffers."""

    call: Call
    inputs: dict[str, NDArray[Any]]
    features: Any
    sampled: SampledBuffers
    rows: NDArray[np.float32]
    nbytes: int
