"""Runs the target's graph over the cache: prefill chunks and verification steps alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.providers.session import Call, Session
from dspark.runtime.bound_calls import BoundCalls
from dspark.runtime.bundle import CacheInfo, Manifest
from dspark.runtime.cache import KeyValueCache
from dspark.runtime.clock import PhaseClock
from dspark.runtime.contract import FEATURE, MASKED, cache_names, context_names, delta_names

__all__ = ["DRAFT", "TARGET", "Target", "TokenRun", "Verification", "causal_bias", "new_rows", "past_bias"]

TARGET, DRAFT = 0, 1
"""Groups of the cache."""


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
    """What a step returned: views of buffers that the next step of the same shape overwrites.

    Attributes:
        logits: float32 ``[K, V]``: of every token, flat, or of each request's last.
        rows: New target rows ``[layers, 2, B, kv_heads, T, head_dim]``.
        context: New draft rows of a block drafter, in the same form; None without one.
        features: EAGLE-3 features ``[N, H]``; None without such a drafter.
        offsets: Index of each request's first token among the N flat ones, and N.
    """

    logits: NDArray[np.float32]
    rows: NDArray[np.float32]
    context: NDArray[np.float32] | None
    features: NDArray[np.float32] | None
    offsets: tuple[int, ...]


class Target:
    """The target's graph.

    Args:
        session: The loaded graph.
        manifest: The bundle's manifest.
        cache: Where it reads the past; committing new rows is the caller's business.
        clock: Tells the time spent in the graph.
        drafting: Whether the drafter's context is wanted.
    """

    def __init__(
        self, session: Session, manifest: Manifest, cache: KeyValueCache, clock: PhaseClock, *, drafting: bool
    ) -> None:
        self._session = session
        self._info = manifest.target
        self._drafter = manifest.drafter if drafting else None
        self._cache = cache
        self._clock = clock
        self._steps = BoundCalls(cache, self._bind)

    def prefill(self, slot: int, run: TokenRun) -> Verification:
        """Computes a piece of a prompt; only its last token gets logits."""
        return self._run("prefill", slot, [run], last_only=True)

    def verify(self, runs: Sequence[TokenRun]) -> Verification:
        """Computes the anchor and draft tokens of the requests in slots 0…R − 1; every token gets logits."""
        return self._run("verify", 0, runs, last_only=False)

    def _run(self, phase: str, first_slot: int, runs: Sequence[TokenRun], *, last_only: bool) -> Verification:
        counts = [len(run.tokens) for run in runs]
        step = self._steps.get(first_slot, len(runs), max(counts), sum(counts), last_only)
        lengths = self._cache.lengths[TARGET, first_slot : first_slot + len(runs)]
        offsets = step.fill(lengths, runs, counts)
        with self._clock.phase(phase):
            step.call.run()
        return Verification(step.logits, step.rows, step.context, step.features, offsets)

    def _bind(self, first_slot: int, requests: int, width: int, total: int, last_only: bool) -> "_Step":
        scored = requests if last_only else total
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros(total, np.int64),
            "position_ids": np.zeros(total, np.int64),
            "pad_index": np.zeros((requests, width), np.int64),
            "unpad_index": np.zeros(total, np.int64),
            "attention_bias": causal_bias(requests, width, self._cache.capacity),
            "logits_index": np.arange(scored),
        }
        if self._info.rope_lengths:
            inputs["rope_lengths"] = np.zeros(total, np.int64)
        cached = dict(inputs)
        slots = slice(first_slot, first_slot + requests)
        for index, arrays in enumerate(self._cache.layers(TARGET, slots)):
            cached.update(zip(cache_names(index), arrays, strict=True))

        logits = np.zeros((scored, self._info.vocabulary_size), np.float32)
        rows = new_rows(self._info.cache, requests, width)
        outputs = {"logits": logits}
        for index, layer in enumerate(rows):
            outputs.update(zip(delta_names(index), layer, strict=True))
        context = features = None
        if self._drafter is not None and self._drafter.kind == "eagle3":
            features = outputs[FEATURE] = np.zeros((total, self._drafter.hidden_size), np.float32)
        elif self._drafter is not None:
            context = new_rows(self._drafter.cache, requests, width)
            for index, layer in enumerate(context):
                outputs.update(zip(context_names(index), layer, strict=True))
        return _Step(self._session.bind(cached, outputs), inputs, logits, rows, context, features, last_only)


@dataclass(frozen=True)
class _Step:
    """A bound call for one shape of step, with its buffers."""

    call: Call
    inputs: dict[str, NDArray[Any]]
    logits: NDArray[np.float32]
    rows: NDArray[np.float32]
    context: NDArray[np.float32] | None
    features: NDArray[np.float32] | None
    last_only: bool

    def fill(self, starts: NDArray[np.int64], runs: Sequence[TokenRun], counts: Sequence[int]) -> tuple[int, ...]:
        """Writes the inputs; returns each request's first flat token and their number."""
        inputs = self.inputs
        ends = np.cumsum(counts)
        begins = ends - counts
        index = np.arange(ends[-1])
        owner = np.repeat(np.arange(len(runs)), counts)
        within = index - begins[owner]
        positions = starts[owner] + within
        _, width = inputs["pad_index"].shape
        inputs["input_ids"][:] = np.concatenate([run.tokens for run in runs])
        inputs["position_ids"][:] = positions
        inputs["pad_index"][:] = np.minimum(begins[:, None] + np.arange(width), ends[:, None] - 1)
        inputs["unpad_index"][:] = owner * width + within
        past = inputs["attention_bias"][..., :-width]
        past[:] = past_bias(starts, past.shape[-1])
        if self.last_only:
            inputs["logits_index"][:] = ends - 1
        if "rope_lengths" in inputs:
            inputs["rope_lengths"][:] = np.maximum(
                positions + 1, np.repeat([run.prompt_length for run in runs], counts)
            )
        return (*begins.tolist(), int(ends[-1]))


def past_bias(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.float32]:
    """Bias ``[B, 1, 1, 1, S]`` that shows each request the first ``lengths`` cached tokens."""
    hidden = np.arange(capacity) >= lengths[:, None]
    return np.where(hidden, np.float32(MASKED), np.float32(0))[:, None, None, None, :]


def causal_bias(requests: int, width: int, capacity: int) -> NDArray[np.float32]:
    """Bias ``[B, 1, 1, T, S + T]`` in which each new token sees the new ones up to itself."""
    bias = np.zeros((requests, 1, 1, width, capacity + width), np.float32)
    bias[..., capacity:] = np.triu(np.full((width, width), MASKED, np.float32), 1)
    return bias


def new_rows(info: CacheInfo, requests: int, width: int) -> NDArray[np.float32]:
    """A buffer ``[layers, 2, B, kv_heads, T, head_dim]`` for the rows that a graph computes."""
    return np.zeros((info.layers, 2, requests, info.kv_heads, width, info.head_dim), np.float32)
