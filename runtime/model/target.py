"""Runs the target's graph over the cache: prefill chunks and verification steps alike."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.providers.session import Buffer, Call, Session, limits_of
from dspark.runtime.bundle.contract import (
    CHOICES,
    FEATURE,
    LOGIT_SUMS,
    MASKED,
    WRITE_INDEX,
    cache_names,
    context_names,
    delta_names,
    present_context_names,
    present_names,
)
from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.cache.allocation import common_allocator
from dspark.runtime.cache.key_value_cache import DRAFT, TARGET, KeyValueCache
from dspark.runtime.decoding.scores import Scores
from dspark.runtime.model.bound_calls import BoundCalls, buffer_bytes
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.masks import causal_bias, new_rows, past_bias, seen_bias
from dspark.runtime.model.places import places

__all__ = ["Target", "TokenRun", "Verification"]

LayerNames = Callable[[int], tuple[str, str]]


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of one request that a step computes, after what its slot holds.

    Attributes:
        tokens: Ids; never empty.
        prompt_length: The request's prompt length, which dynamic RoPE scaling depends on.
    """

    tokens: Sequence[int]
    prompt_length: int


@dataclass(frozen=True)
class Verification:
    """What a step returned: views of buffers that the next step overwrites.

    Attributes:
        scores: Of every token, flat, or of each request's last; padding follows.
        rows: New rows ``[layers, 2, B, kv_heads, T, head_dim]`` for each group of the cache, unless the graph has
            written them into the cache itself.
        features: EAGLE-3 features ``[N, H]``, on the host or a device; None without such a drafter.
        offsets: Index of each request's first token among the N flat ones, and N.
    """

    scores: Scores
    rows: Mapping[int, NDArray[np.float32]]
    features: Buffer | None
    offsets: tuple[int, ...]

    def scores_of(self, index: int) -> Scores:
        """Scores of all tokens of a request, by its place in the step."""
        return self.scores.part(*self.offsets[index : index + 2])


class Target:
    """The target's graph.

    Args:
        session: The loaded graph.
        manifest: The bundle's manifest.
        cache: Where it reads the past.
        clock: Tells the time spent in the graph.
        allocate_features: Makes arrays that the drafter reads as well.

    Attributes:
        most_prompt_tokens: Tokens that ``prefill`` takes at most; None if any number.
    """

    def __init__(
        self,
        session: Session,
        manifest: Manifest,
        cache: KeyValueCache,
        clock: PhaseClock,
        allocate_features: Callable[..., Any] = np.zeros,
    ) -> None:
        self._session = session
        self._info = manifest.target
        self._shapes = manifest.shapes
        stated = (limits_of(session).prompt_tokens, manifest.shapes.chunk if manifest.shapes else None)
        self.most_prompt_tokens = min((tokens for tokens in stated if tokens is not None), default=None)
        self._allocate_features = allocate_features
        self._drafter = manifest.drafter
        self._in_place = manifest.cache_form == "in-place"
        self._groups = {TARGET: manifest.target.cache}
        if manifest.drafter is not None and manifest.drafter.kind != "eagle3":
            self._groups[DRAFT] = manifest.drafter.cache
        self._cache = cache
        self._clock = clock
        self._allocate = common_allocator([session], np.zeros) if self._in_place else np.zeros
        self._logits = self._allocate((0, self._info.vocabulary_size), np.float32)
        self._steps = BoundCalls(cache, self._bind)
        self._steps.get(0, *self._step_shape([1], last_only=True), True)  # shows now if this is another graph

    def prefill(self, slot: int, run: TokenRun) -> Verification:
        """Computes a piece of a prompt; only its last token gets logits."""
        return self._run("prefill", slot, [run], last_only=True)

    def verify(self, runs: Sequence[TokenRun]) -> Verification:
        """Computes the anchor and draft tokens of the requests in slots 0…R − 1; every token gets logits."""
        return self._run("verify", 0, runs, last_only=False)

    def commit(self, slot: int, verification: Verification, index: int, count: int) -> None:
        """Keeps the cache rows of a request's first ``count`` tokens of a step; the others are forgotten.

        Args:
            slot: The request's slot.
            verification: The step.
            index: The request's place in it.
            count: Tokens to keep.
        """
        for group in self._groups:
            if self._in_place:
                self._cache.advance(group, slot, count)
            else:
                self._cache.append(group, slot, verification.rows[group][:, :, index, :, :count])
        first, end = verification.offsets[index : index + 2]
        if self._in_place and count < end - first and not verification.scores.finite(end - 1):
            self._cache.clear_tail(slot)  # a rejected token, which is never looked at again, must not spoil later sums

    def _run(self, phase: str, first_slot: int, runs: Sequence[TokenRun], *, last_only: bool) -> Verification:
        counts = tuple(len(run.tokens) for run in runs)
        lengths = self._cache.lengths[TARGET, first_slot : first_slot + len(runs)]
        if self._shapes is None:
            self._cache.reserve(int(lengths.max()) + max(counts))
        step = self._steps.get(first_slot, *self._step_shape(counts, last_only=last_only), last_only)
        offsets = step.fill(lengths, runs, counts)
        with self._clock.phase(phase):
            step.call.run()
        # Of its own, as an earlier step's remembers what it has read from the device.
        scores = Scores(step.scores.logits, step.scores.choices, step.scores.sums)
        return Verification(scores, step.rows, step.features, offsets)

    def _logits_rows(self, count: int) -> Any:
        """A buffer ``[count, V]``, the same for steps of all shapes: a fresh one costs more than a step does.

        It at least doubles: those before it, which steps that are still bound keep, are smaller together.
        """
        held = self._logits.shape[0]
        if held < count:
            self._logits = self._allocate((max(count, 2 * held), self._info.vocabulary_size), np.float32)
        return self._logits[:count]

    def _step_shape(self, counts: Sequence[int], *, last_only: bool) -> tuple[int, int, int]:
        """Requests, most tokens of a request and all tokens that the graph computes, padding included."""
        if self._shapes is None:
            return len(counts), max(counts), sum(counts)
        if last_only:
            return 1, self._shapes.chunk, self._shapes.chunk
        return self._shapes.batch, self._shapes.block, self._shapes.batch * self._shapes.block

    def _bind(self, first_slot: int, requests: int, width: int, total: int, last_only: bool) -> "_Step":
        scored, capacity = requests if last_only else total, self._cache.capacity
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros(total, np.int64),
            "position_ids": np.zeros(total, np.int64),
            "pad_index": np.zeros((requests, width), np.int64),
            "unpad_index": np.zeros(total, np.int64),
            "logits_index": np.arange(scored),
        }
        if self._in_place:
            inputs["attention_bias"] = np.zeros((requests, 1, 1, width, capacity), np.float32)
            inputs[WRITE_INDEX] = np.zeros(requests, np.int64)
        else:
            inputs["attention_bias"] = causal_bias(requests, width, capacity)
        if self._info.rope_lengths:
            inputs["rope_lengths"] = np.zeros(total, np.int64)

        logits = self._logits_rows(scored)
        cached, outputs, scores = dict(inputs), {"logits": logits}, Scores(logits)
        if self._in_place:
            choices, sums = np.zeros(scored, np.int64), np.zeros(scored, np.float32)
            outputs |= {CHOICES: choices, LOGIT_SUMS: sums}
            scores = Scores(logits, choices, sums)
        rows = {}
        for group in self._groups:
            past_names, kept_names = _names(group, in_place=self._in_place)
            layers = list(self._cache.layers(group, slice(first_slot, first_slot + requests)))
            if not self._in_place:
                rows[group] = new_rows(self._groups[group], requests, width)
            kept: Iterable[Iterable[NDArray[np.float32]]] = layers if self._in_place else rows[group]
            if past_names is not None:
                for index, pair in enumerate(layers):
                    cached.update(zip(past_names(index), pair, strict=True))
            for index, arrays in enumerate(kept):
                outputs.update(zip(kept_names(index), arrays, strict=True))
        features = None
        if self._drafter is not None and self._drafter.kind == "eagle3":
            features = outputs[FEATURE] = self._allocate_features((total, self._drafter.hidden_size), np.float32)
        return _Step(self._session.bind(cached, outputs), inputs, scores, rows, features, last_only)


def _names(group: int, *, in_place: bool) -> tuple[LayerNames | None, LayerNames]:
    """Names of a layer's cache among the graph's inputs, if it is one, and of what the graph makes of it."""
    if group == TARGET:
        return cache_names, present_names if in_place else delta_names
    return (context_names, present_context_names) if in_place else (None, context_names)


@dataclass(frozen=True)
class _Step:
    """A bound call for one shape of step, with its buffers."""

    call: Call
    inputs: dict[str, NDArray[Any]]
    scores: Scores
    rows: Mapping[int, NDArray[np.float32]]
    features: Buffer | None
    last_only: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers; the logits are all steps'."""
        features = 0 if self.features is None else self.features.nbytes
        return features + buffer_bytes(self.inputs, self.rows)

    def fill(self, starts: NDArray[np.int64], runs: Sequence[TokenRun], counts: tuple[int, ...]) -> tuple[int, ...]:
        """Writes the inputs; returns each request's first flat token and their number.

        Padding keeps values that the graph can compute with: ids, positions and indices of earlier steps.
        """
        inputs, requests = self.inputs, len(runs)
        _, width = inputs["pad_index"].shape
        spots = places(counts, width)
        total = spots.offsets[-1]
        positions = starts[spots.owner] + spots.within
        inputs["input_ids"][:total] = [token for run in runs for token in run.tokens]
        inputs["position_ids"][:total] = positions
        inputs["pad_index"][:requests] = spots.pad_index
        inputs["unpad_index"][:total] = spots.unpad_index
        bias = inputs["attention_bias"]
        if WRITE_INDEX in inputs:
            inputs[WRITE_INDEX][:] = starts
            bias[:] = seen_bias(starts[:, None] + np.arange(width), bias.shape[-1])[:, None, None]
        else:
            past = bias[..., :-width]
            past[:requests] = past_bias(starts, past.shape[-1])
            past[requests:] = MASKED
        if self.last_only:
            inputs["logits_index"][:] = np.subtract(spots.offsets[1:], 1)
        if "rope_lengths" in inputs:
            inputs["rope_lengths"][:total] = np.maximum(
                positions + 1, np.repeat([run.prompt_length for run in runs], counts)
            )
        return spots.offsets
