"""Drafters: what proposes a block of tokens for every running request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dspark.providers.session import Call, DeviceSession, Session
from dspark.runtime.bound_calls import BoundCalls, buffer_bytes
from dspark.runtime.bundle import Bundle, DrafterInfo, HeadInfo, StaticShapes
from dspark.runtime.cache import KeyValueCache, common_allocator
from dspark.runtime.clock import PhaseClock
from dspark.runtime.contract import CANDIDATES, DRAFT_IDS, MASKED, context_names, delta_names
from dspark.runtime.target import DRAFT, Verification, causal_bias, new_rows, past_bias

__all__ = ["BlockDrafter", "DraftInput", "Drafter", "Eagle3Drafter", "Proposal", "make_drafter"]

EXTENSION = 256
"""Committed tokens that an EAGLE-3 drafter takes at once, which bounds its attention's memory."""


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of the requests in slots 0…R − 1: views of buffers that the next proposal overwrites.

    Attributes:
        tokens: Target ids, int64 ``[R, γ]``.
        logits: What they were drawn from, float32 ``[R, γ, K]``; None if they lie on a device and no request draws.
        ids: Target ids of the logits, int64 ``[R, γ, K]``; None when logit i is of token i.
        confidence: Logits of the tokens' survival, float32 ``[R, γ]``; None without a confidence head.
    """

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32] | None
    ids: NDArray[np.int64] | None
    confidence: NDArray[np.float32] | None

    def drawn_from(self, index: int, length: int) -> tuple[NDArray[np.float32] | None, NDArray[np.int64] | None]:
        """Logits and ids of a request's first ``length`` tokens."""
        logits = None if self.logits is None else self.logits[index, :length]
        return logits, None if self.ids is None else self.ids[index, :length]


@dataclass(frozen=True)
class DraftInput:
    """What a request brings to a draft.

    Attributes:
        anchor: Its last token.
        uniforms: Random numbers ``[γ]`` for the draws.
        temperature: Of the draft; 0 takes the likeliest tokens.
    """

    anchor: int
    uniforms: NDArray[np.float32]
    temperature: float

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, and their distribution is needed to accept them, rather than chosen."""
        return self.temperature > 0


class Drafter(Protocol):
    """Follows what the target commits and proposes what might come next."""

    def begin(self, slot: int) -> None:
        """Starts with a new request in a slot."""

    def commit(self, slot: int, verification: Verification, index: int, following: Sequence[int]) -> None:
        """Takes over the context of committed tokens.

        Args:
            slot: The request's slot; its committed tokens go after what it holds.
            verification: The step that computed them.
            index: The request's place in that step.
            following: The token after each committed token.
        """

    def move(self, slot: int, source: int) -> None:
        """Follows a request that moved from one slot to another."""

    def propose(self, inputs: Sequence[DraftInput]) -> Proposal:
        """Drafts a block for the requests in slots 0…R − 1."""


class _Sampled:
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
        self.inputs["uniform"][: len(inputs)] = [item.uniforms for item in inputs]
        self.inputs["temperature"][: len(inputs)] = [item.temperature for item in inputs]

    def proposal(self, requests: int) -> Proposal:
        first = slice(0, requests)
        logits = None if self.logits is None else self.logits[first]
        ids = None if self.ids is None else self.ids[first]
        confidence = None if self.confidence is None else self.confidence[first]
        return Proposal(self.tokens[first], logits, ids, confidence)


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
        self._on_device = isinstance(head_session, DeviceSession)
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

    def propose(self, inputs: Sequence[DraftInput]) -> Proposal:
        """Drafts a block for the requests in slots 0…R − 1."""
        requests = len(inputs)
        logits = not self._on_device or any(item.draws for item in inputs)
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
        sampled = _Sampled(info, self._vocabulary, requests, logits=logits, confidence=confidence)
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
    sampled: _Sampled
    nbytes: int


@dataclass
class _Pending:
    """Committed tokens of a request that an EAGLE-3 drafter has not taken yet.

    Attributes:
        features: The target's feature ``[H]`` at each token.
        following: The token after each.
    """

    features: list[NDArray[np.float32]] = field(default_factory=list)
    following: list[int] = field(default_factory=list)


class Eagle3Drafter:
    """EAGLE-3: extends its cache with committed tokens and drafts token by token, all in one graph call.

    Args:
        session: The drafter's graph.
        info: The drafter's description.
        vocabulary: Target ids of a reduced draft vocabulary, int64 ``[V']``.
        cache: Holds the drafter's own keys and values.
        clock: Tells the time spent in the graph.
        shapes: The only shapes of its calls; None if any will do.
    """

    def __init__(
        self,
        session: Session,
        info: DrafterInfo,
        vocabulary: NDArray[np.int64] | None,
        cache: KeyValueCache,
        clock: PhaseClock,
        shapes: StaticShapes | None = None,
    ) -> None:
        self._session = session
        self._on_device = isinstance(session, DeviceSession)
        self._shapes = shapes
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
        self._pending[slot] = _Pending()

    def commit(self, slot: int, verification: Verification, index: int, following: Sequence[int]) -> None:
        """Keeps the features of committed tokens, each paired with the token after it, for the next proposal."""
        assert verification.features is not None
        start = verification.offsets[index]
        pending = self._pending[slot]
        pending.features.extend(verification.features[start : start + len(following)].copy())
        pending.following.extend(following)

    def move(self, slot: int, source: int) -> None:
        """Follows a request that moved from one slot to another."""
        self._pending[slot] = self._pending.pop(source)

    def propose(self, inputs: Sequence[DraftInput]) -> Proposal:
        """Drafts a block for the requests in slots 0…R − 1."""
        shapes = self._shapes
        most, final = (EXTENSION, EXTENSION) if shapes is None else (shapes.chunk, shapes.block)
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
        logits = not self._on_device or any(item.draws for item in inputs)
        extension = self._extensions.get(first_slot, *(fixed or (requests, max(counts))), logits)
        lengths = self._cache.lengths[DRAFT, slots]
        buffers = extension.inputs
        width = buffers["input_ids"].shape[1]
        for index, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            pending = self._pending[slot]
            buffers["input_ids"][index, :count] = pending.following[:count]
            buffers["features"][index, :count] = pending.features[:count]
            del pending.following[:count], pending.features[:count]
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
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros((requests, width), np.int64),
            "features": np.zeros((requests, width, self._info.hidden_size), np.float32),
            "position_ids": np.zeros((requests, width), np.int64),
            "last_index": np.zeros(requests, np.int64),
            "attention_bias": causal_bias(requests, width, self._cache.capacity),
        }
        sampled = _Sampled(self._info, self._vocabulary, requests, logits=logits, confidence=False)
        bound = {**inputs, **sampled.inputs}
        for index, arrays in enumerate(self._cache.layers(DRAFT, slice(first_slot, first_slot + requests))):
            bound.update(zip(context_names(index), arrays, strict=True))
        rows = new_rows(self._info.cache, requests, width)
        outputs = dict(sampled.outputs)
        for index, layer in enumerate(rows):
            outputs.update(zip(delta_names(index), layer, strict=True))
        nbytes = buffer_bytes(inputs, sampled.inputs, outputs)
        return _Extension(self._session.bind(bound, outputs), inputs, sampled, rows, nbytes)


@dataclass(frozen=True)
class _Extension:
    """A bound call for one shape of extension, with its buffers."""

    call: Call
    inputs: dict[str, NDArray[Any]]
    sampled: _Sampled
    rows: NDArray[np.float32]
    nbytes: int


def make_drafter(bundle: Bundle, sessions: Mapping[str, Session], cache: KeyValueCache, clock: PhaseClock) -> Drafter:
    """The drafter of a bundle that has one, over its loaded graphs."""
    info, head, vocabulary = bundle.manifest.drafter, bundle.manifest.head, bundle.draft_vocabulary()
    assert info is not None
    shapes = bundle.manifest.shapes
    if info.kind == "eagle3":
        return Eagle3Drafter(sessions["drafter"], info, vocabulary, cache, clock, shapes)
    assert head is not None
    batch = None if shapes is None else shapes.batch
    return BlockDrafter(sessions["drafter"], sessions["head"], info, head, vocabulary, cache, clock, batch)
