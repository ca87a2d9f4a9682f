"""The inputs and outputs of a bundle's graphs: the exporter declares them from here, the runtime binds them.

Dimensions are numbers where a graph fixes them, and names where they are free: ``B`` requests, ``N`` flat tokens, ``T``
the most tokens of a request, ``S`` the cache's capacity, ``S+T`` cached and new keys, ``K`` scored tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.runtime.bundle.contract import (
    CANDIDATES,
    CHOICES,
    DRAFT_IDS,
    FEATURE,
    LOGIT_SUMS,
    WRITE_INDEX,
    cache_names,
    context_names,
    delta_names,
    present_context_names,
    present_names,
)
from dspark.runtime.bundle.manifest import CacheForm, CacheInfo, DrafterInfo, Manifest

__all__ = [
    "DrafterFacts",
    "GraphSpec",
    "TargetFacts",
    "TensorSpec",
    "block_drafter_spec",
    "eagle3_drafter_spec",
    "graph_specs",
    "head_spec",
    "target_spec",
]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph.

    Attributes:
        name: Its name.
        dtype: Type of its elements.
        shape: Numbers, and names of free dimensions.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class GraphSpec:
    """All inputs and outputs of a graph, in the graph's order.

    Attributes:
        name: The graph: ``target``, ``drafter`` or ``head``.
        inputs: What must be bound.
        outputs: What can be.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class TargetFacts:
    """What a target's inputs and outputs follow from.

    Attributes:
        cache_form: How its graph keeps keys and values.
        cache: Shape of its cache rows.
        vocabulary_size: Width of its logits.
        rope_lengths: Whether it scales RoPE with the text's length (dynamic NTK).
    """

    cache_form: CacheForm
    cache: CacheInfo
    vocabulary_size: int
    rope_lengths: bool


@dataclass(frozen=True)
class DrafterFacts:
    """What a drafter's inputs and outputs follow from.

    Attributes:
        one_pass: Whether it drafts a block in one pass (DSpark, DFlash), which a head then samples, or token by token
            (EAGLE-3).
        cache: Shape of its cache rows.
        hidden_size: Width of its hidden states (H').
        draft_length: Tokens of a draft (γ).
        choices: Tokens that a draft token is drawn from.
        candidates: Whether these are the likeliest ones of each slot (a top-k) instead of the draft vocabulary.
        confidence: Whether it rates its tokens.
    """

    one_pass: bool
    cache: CacheInfo
    hidden_size: int
    draft_length: int
    choices: int
    candidates: bool
    confidence: bool


def graph_specs(manifest: Manifest) -> dict[str, GraphSpec]:
    """The specification of every graph of a bundle, by the graph's name."""
    info = manifest.target
    target = TargetFacts(manifest.cache_form, info.cache, info.vocabulary_size, info.rope_lengths)
    if manifest.drafter is None:
        return {"target": target_spec(target, None)}
    drafter = _drafter_facts(manifest.drafter, confidence=manifest.has_confidence)
    specs = {"target": target_spec(target, drafter)}
    if drafter.one_pass:
        return specs | {"drafter": block_drafter_spec(drafter), "head": head_spec(drafter)}
    return specs | {"drafter": eagle3_drafter_spec(drafter)}


def target_spec(target: TargetFacts, drafter: DrafterFacts | None) -> GraphSpec:
    """The target's graph, which also computes what its drafter reads."""
    in_place = target.cache_form == "in-place"
    inputs = [
        *(_integers(name, "N") for name in ("input_ids", "position_ids")),
        _integers("pad_index", "B", "T"),
        _integers("unpad_index", "N"),
        _integers("logits_index", "K"),
    ]
    if target.rope_lengths:
        inputs.append(_integers("rope_lengths", "N"))
    inputs += _rows(cache_names, target.cache, "S")
    if in_place:
        inputs.append(_integers(WRITE_INDEX, "B"))
    inputs.append(_floats("attention_bias", "B", 1, 1, "T", "S" if in_place else "S+T"))
    outputs = _rows(present_names, target.cache, "S") if in_place else _rows(delta_names, target.cache, "T")
    outputs.append(_floats("logits", "K", target.vocabulary_size))
    if in_place:
        outputs += [_integers(CHOICES, "K"), _floats(LOGIT_SUMS, "K")]
    if drafter is not None and not drafter.one_pass:
        outputs.append(_floats(FEATURE, "N", drafter.hidden_size))
    elif drafter is not None and in_place:
        inputs += _rows(context_names, drafter.cache, "S")
        outputs += _rows(present_context_names, drafter.cache, "S")
    elif drafter is not None:
        outputs += _rows(context_names, drafter.cache, "T")
    return GraphSpec("target", tuple(inputs), tuple(outputs))


def block_drafter_spec(drafter: DrafterFacts) -> GraphSpec:
    """The graph of a drafter that drafts a block in one pass."""
    inputs = [
        *(_integers(name, "B") for name in ("anchor_ids", "anchor_positions")),
        _floats("context_bias", "B", 1, 1, 1, "S"),
        *_rows(context_names, drafter.cache, "S"),
    ]
    return GraphSpec("drafter", tuple(inputs), (*_candidates(drafter), *_drafted(drafter)))


def head_spec(drafter: DrafterFacts) -> GraphSpec:
    """The graph that samples a block drafter's tokens; it reads all that the drafter's graph returns."""
    anchors = _integers("anchor_ids", "B")
    inputs = (*_drafted(drafter), *_candidates(drafter), anchors, *_randomness(drafter))
    outputs = _sampled(drafter)
    if drafter.candidates:
        outputs.insert(0, _integers(DRAFT_IDS, "B", drafter.draft_length, drafter.choices))
    if drafter.confidence:
        outputs.append(_floats("confidence", "B", drafter.draft_length))
    return GraphSpec("head", inputs, tuple(outputs))


def eagle3_drafter_spec(drafter: DrafterFacts) -> GraphSpec:
    """The graph of an EAGLE-3 drafter, which samples its tokens itself."""
    inputs = [
        _integers("input_ids", "B", "T"),
        _floats("features", "B", "T", drafter.hidden_size),
        _integers("position_ids", "B", "T"),
        _integers("last_index", "B"),
        _floats("attention_bias", "B", 1, 1, "T", "S+T"),
        *_rows(context_names, drafter.cache, "S"),
        *_randomness(drafter),
    ]
    return GraphSpec("drafter", tuple(inputs), (*_rows(delta_names, drafter.cache, "T"), *_sampled(drafter)))


def _drafter_facts(info: DrafterInfo, *, confidence: bool) -> DrafterFacts:
    return DrafterFacts(
        one_pass=info.kind != "eagle3",
        cache=info.cache,
        hidden_size=info.hidden_size,
        draft_length=info.draft_length,
        choices=info.choices,
        candidates=info.top_k is not None,
        confidence=confidence,
    )


def _drafted(drafter: DrafterFacts) -> list[TensorSpec]:
    """Hidden states and logits that a block drafter hands to its head."""
    return [
        _floats("hidden", "B", drafter.draft_length, drafter.hidden_size),
        _floats("base_logits", "B", drafter.draft_length, drafter.choices),
    ]


def _candidates(drafter: DrafterFacts) -> list[TensorSpec]:
    """The draft ids of these logits, where they are not the draft vocabulary."""
    return [_integers(CANDIDATES, "B", drafter.draft_length, drafter.choices)] if drafter.candidates else []


def _randomness(drafter: DrafterFacts) -> list[TensorSpec]:
    """What a graph samples with."""
    return [_floats("uniform", "B", drafter.draft_length), _floats("temperature", "B")]


def _sampled(drafter: DrafterFacts) -> list[TensorSpec]:
    """What a graph samples: target ids, and the logits they were drawn from."""
    return [
        _integers("tokens", "B", drafter.draft_length),
        _floats("draft_logits", "B", drafter.draft_length, drafter.choices),
    ]


def _rows(names: Callable[[int], tuple[str, str]], cache: CacheInfo, tokens: str) -> list[TensorSpec]:
    """Keys and values of every layer."""
    shape = ("B", cache.kv_heads, tokens, cache.head_dim)
    return [_floats(name, *shape) for layer in range(cache.layers) for name in names(layer)]


def _floats(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, np.dtype(np.float32), shape)


def _integers(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, np.dtype(np.int64), shape)
