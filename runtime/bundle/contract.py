"""Names and constants that exported graphs and the runtime agree on."""

__all__ = [
    "CANDIDATES",
    "CHOICES",
    "DRAFT_IDS",
    "FEATURE",
    "GREEDY_TEMPERATURE",
    "LOGIT_SUMS",
    "MASKED",
    "WRITE_INDEX",
    "cache_names",
    "context_names",
    "delta_names",
    "present_context_names",
    "present_names",
]

MASKED = -30000.0
"""Attention bias of a key that must not be seen: zero after softmax, and finite in float16 even when added twice."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this choose the argmax."""

CANDIDATES = "candidates"
"""Output of a drafter with a top-k, input of its head, ``[B, γ, K]``: the draft ids of the base logits."""

DRAFT_IDS = "draft_ids"
"""Output of such a head, ``[B, γ, K]``: the target ids of the draft logits."""

FEATURE = "feature"
"""The target's output that an EAGLE-3 drafter reads, ``[N, H]``: the projected taps."""

CHOICES = "choices"
"""Output of a target that writes its cache in place, ``[K]``: the token of each row's largest logit."""

LOGIT_SUMS = "logit_sums"
"""Another, ``[K]``: each row's sum, which is finite only if all its logits are."""

WRITE_INDEX = "write_index"
"""Input of a target that writes its cache in place, ``[B]``: the row of each request's first new token."""


def cache_names(layer: int) -> tuple[str, str]:
    """Names of a target layer's cached keys and values, graph inputs ``[B, Hkv, S, D]``."""
    return f"past.{layer}.key", f"past.{layer}.value"


def delta_names(layer: int) -> tuple[str, str]:
    """Names of a target layer's new rows, graph outputs ``[B, Hkv, T, D]``."""
    return f"new.{layer}.key", f"new.{layer}.value"


def present_names(layer: int) -> tuple[str, str]:
    """Names of a target layer's cache with the new rows in it, graph outputs ``[B, Hkv, S, D]``."""
    return f"present.{layer}.key", f"present.{layer}.value"


def context_names(layer: int) -> tuple[str, str]:
    """Names of a draft layer's rows: inputs of the drafter's graph.

    In the target's graph they are outputs (the new rows) or, where it writes in place, inputs (the cache).
    """
    return f"context.{layer}.key", f"context.{layer}.value"


def present_context_names(layer: int) -> tuple[str, str]:
    """Names of a draft layer's cache with the new rows in it: outputs of a target that writes in place."""
    return f"present.context.{layer}.key", f"present.context.{layer}.value"
