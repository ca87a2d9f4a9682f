"""One description that every checkpoint layout is read into.

Readers know file formats and spellings; the graph builders know only what stands here. All tensors carry the names of
the DeepSpec and Hugging Face layouts without their ``model.`` prefix (``layers.0.self_attn.q_proj.weight``), so a name
means the same tensor whatever file it came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark.exporter.checkpoints.tensors import LazyTensor

__all__ = [
    "Backbone",
    "ConfidenceInput",
    "Drafter",
    "DrafterKind",
    "DynamicScaling",
    "HeadKind",
    "Layer",
    "Rope",
    "Target",
    "TextAssets",
]


class DrafterKind(StrEnum):
    """How a drafter proposes: a block at once (DSpark, DFlash) or token by token (EAGLE-3)."""

    DSPARK = "dspark"
    DFLASH = "dflash"
    EAGLE3 = "eagle3"


class HeadKind(StrEnum):
    """The sequential head that repairs a block's base logits (docs/explanation/algorithm.md, "The drafters")."""

    NONE = "none"
    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


class ConfidenceInput(StrEnum):
    """What the confidence head reads: nothing (no head), the hidden state, or that and the Markov embedding."""

    NONE = "none"
    HIDDEN = "hidden"
    HIDDEN_AND_MARKOV = "hidden_and_markov"


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK scaling: the base grows with the text once it is longer than ``original_length``.

    ``base' = theta · (factor · length / original_length − (factor − 1)) ^ (d / (d − 2))`` with d rotated dimensions.
    """

    theta: float
    factor: float
    original_length: int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, resolved to numbers.

    Attributes:
        inverse_frequencies: One float32 value for each rotated pair; scaling is already applied.
        magnitude: Factor on cos and sin (YaRN's attention factor), 1 for the other types.
        dynamic: Set for dynamic NTK only, where the frequencies depend on the text's length.
    """

    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0
    dynamic: DynamicScaling | None = None

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head; the rest pass through (``partial_rotary_factor``)."""
        return 2 * len(self.inverse_frequencies)


@dataclass(frozen=True)
class Layer:
    """What one decoder layer may see.

    Attributes:
        window: Width of the sliding window, the token itself included; None sees everything.
        causal: Only for drafter layers: whether a block slot sees just the slots before it. Target layers are causal.
    """

    window: int | None = None
    causal: bool = True


@dataclass(frozen=True)
class Backbone:
    """The decoder layers that targets and drafters have in common (RMSNorm, gated SiLU MLP, rotary attention)."""

    hidden_size: int
    intermediate_size: int
    head_count: int
    kv_head_count: int
    head_dim: int
    norm_epsilon: float
    rope: Rope
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class TextAssets:
    """What turns text into ids and back.

    Attributes:
        tokenizer: Content of ``tokenizer.json``; None if the checkpoint has no tokenizer.
        chat_template: A Jinja template; None if the model has none.
        special_tokens: Names a chat template may use (``bos_token``, ``eos_token``, …) and their texts.
        vocabulary: Every token's id; empty without a tokenizer.
        ends: Tokens that end a text although no configuration says so, each with why.
        notes: What its user should know.
    """

    tokenizer: str | None
    chat_template: str | None
    special_tokens: Mapping[str, str]
    vocabulary: Mapping[str, int] = field(default_factory=dict, repr=False)
    ends: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A target model.

    Attributes:
        family: ``llama``, ``mistral``, ``qwen2`` or ``qwen3``.
        name: What people call it: the folder's or file's name.
        context_length: Longest text in tokens, RoPE scaling included.
        stop_token_ids: Union of the ids in ``config.json`` and ``generation_config.json`` and of ``text.ends``, sorted.
        tensors: ``embed_tokens.weight``, ``norm.weight``, ``layers.{i}.*`` and, unless tied, ``lm_head.weight``.
        files: The checkpoint's weight files, hashed into the manifest.
        notes: What its user should know: where it stops and why, what was left out, what will not work.
    """

    family: str
    name: str
    backbone: Backbone
    vocabulary_size: int
    context_length: int
    stop_token_ids: tuple[int, ...]
    tensors: Mapping[str, LazyTensor]
    text: TextAssets
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> Mapping[str, LazyTensor]:
        """Embedding and LM head, which drafters may borrow; a tied LM head is the embedding itself."""
        embedding = self.tensors["embed_tokens.weight"]
        return {
            "embed_tokens.weight": embedding,
            "lm_head.weight": self.tensors.get("lm_head.weight", embedding),
        }


@dataclass(frozen=True)
class Drafter:
    """A drafter, checked against its target.

    Attributes:
        layout: The file layout it came in: ``deepspec``, ``z-lab``, ``speculators`` or ``eagle3``.
        taps: Layer outputs of the target that it reads, strictly increasing; −1 is the embedding output.
        block_size: Slots of a block (DSpark, DFlash); the number of steps for EAGLE-3.
        anchor_predicts: Whether slot 0, the anchor's, proposes a token (DeepSpec) or not (z-lab).
        mask_token_id: Fills the slots after the anchor; None for EAGLE-3.
        vocabulary_size: Width of the draft logits (V').
        draft_vocabulary: Target ids of a reduced draft vocabulary, int64 ``[V']``; None when it is the target's.
        top_k: So many tokens of each slot, the likeliest by the base logits, are all that the head chooses from; None
            leaves it the whole vocabulary.
        norm_before_residual: EAGLE-3: the residual starts from the normed feature.
        norm_before_fc: EAGLE-3: ``input_norm.weight`` is applied to the concatenated taps before ``fc``.
        norm_output: EAGLE-3: the next step's feature is the hidden state after the final norm, not before it.
        fc_norm: EAGLE-3: every tap has its own norm ``fc_norm.{i}.weight`` before ``fc``.
        tensors: ``fc.weight``, ``norm.weight``, ``layers.{i}.*``, ``hidden_norm.weight`` (blocks) or
            ``layers.0.hidden_norm.weight`` (EAGLE-3), ``markov_head.*``, ``confidence_head.proj.*``;
            ``embed_tokens.weight`` and ``lm_head.weight`` only when they are the drafter's own.
        notes: What its user should know.
    """

    kind: DrafterKind
    layout: str
    name: str
    backbone: Backbone
    taps: tuple[int, ...]
    block_size: int
    anchor_predicts: bool
    mask_token_id: int | None
    head: HeadKind
    markov_rank: int
    confidence: ConfidenceInput
    vocabulary_size: int
    draft_vocabulary: NDArray[np.int64] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    tensors: Mapping[str, LazyTensor]
    files: tuple[Path, ...]
    top_k: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def choices(self) -> int:
        """Tokens that a draft token is drawn from (K)."""
        return self.vocabulary_size if self.top_k is None else self.top_k

    @property
    def draft_length(self) -> int:
        """Tokens a draft proposes (γ)."""
        return self.block_size if self.anchor_predicts else self.block_size - 1
