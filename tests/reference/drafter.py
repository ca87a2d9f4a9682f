"""Drafters: DSpark and DFlash (DeepSpec, z-lab and speculators layouts) and EAGLE-3."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .folder import read_config, read_tensors, with_class_defaults
from .layers import Array, attention, heads, linear, mlp, rms_norm, sigmoid
from .rope import Rope
from .target import ReferenceTarget

__all__ = ["Draft", "ReferenceDrafter"]


@dataclass
class Draft:
    """One greedy draft of γ tokens.

    Attributes:
        hidden: Post-norm states of the predicting slots ``[γ, H]``; for EAGLE-3 the states it recycles.
        base_logits: Before the sequential head ``[γ, V']``; the same as ``logits`` for EAGLE-3.
        tokens: The greedy chain, target ids.
        logits: With the bias along that chain ``[γ, V']``.
        confidence: Confidence logits ``[γ]``, None without a confidence head.
    """

    hidden: Array
    base_logits: Array
    tokens: list[int]
    logits: Array
    confidence: Array | None


@dataclass
class Layout:
    """What the readers of the file layouts agree on."""

    backbone: dict[str, Any]
    tap_ids: list[int]
    block_size: int
    anchor_predicts: bool = True
    mask_token_id: int | None = None
    layers: list[tuple[bool, int | None]] | None = None  # (causal within the block, window); None for EAGLE-3


def _windows(backbone: dict[str, Any]) -> list[int | None]:
    """The window of every layer: ``layer_types`` decides, and without it the rule of Qwen's configuration classes."""
    count, window = backbone["num_hidden_layers"], backbone.get("sliding_window")
    first = backbone.get("max_window_layers", 0) if backbone.get("use_sliding_window") else count
    kinds = backbone.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (count - first)
    return [window if kind == "sliding_attention" else None for kind in kinds[:count]]


def _block_layers(backbone: dict[str, Any], sliding: bool, full: bool = False) -> list[tuple[bool, int | None]]:
    """The layers of a block drafter, given whether sliding and full ones are causal within the block."""
    return [(full if window is None else sliding, window) for window in _windows(backbone)]


def _read_deepspec(config: dict[str, Any]) -> Layout:
    backbone, taps = with_class_defaults(config), config["target_layer_ids"]
    return Layout(backbone, taps, config["block_size"], True, config["mask_token_id"], _block_layers(backbone, False))


def _read_zlab(config: dict[str, Any], target_layers: int) -> Layout:
    """Slot 0 predicts nothing; sliding layers are causal within the block unless the file says otherwise."""
    backbone = with_class_defaults(config)
    count, taps = backbone["num_hidden_layers"], config.get("target_layer_ids")
    if taps is None and count == 1:
        taps = [target_layers // 2]
    elif taps is None:
        taps = [round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count)]
    causal = config.get("is_causal", config.get("causal"))
    layers = _block_layers(backbone, True) if causal is None else _block_layers(backbone, causal, causal)
    return Layout(backbone, taps, config.get("block_size", 16), False, config["mask_token_id"], layers)


def _read_speculators_block(config: dict[str, Any]) -> Layout:
    """Tap ids count the embedding as 0; a file without ``sample_from_anchor`` does not sample from it.

    Full attention is always bidirectional. Files without ``sliding_window_non_causal`` are older than causal windows.
    """
    backbone = with_class_defaults(config["transformer_layer_config"])
    taps = [tap - 1 for tap in config["aux_hidden_state_layer_ids"]]
    layers = _block_layers(backbone, not config.get("sliding_window_non_causal", True))
    anchor = config.get("sample_from_anchor", False)
    return Layout(backbone, taps, config["block_size"], anchor, config["mask_token_id"], layers)


def _read_eagle3(config: dict[str, Any], target_layers: int, steps: int | None) -> Layout:
    """DeepSpec (``target_layer_ids``), speculators, or legacy.

    Top-level ``eagle_aux_hidden_state_layer_ids`` and their default (2, N/2, N − 3) count the embedding as 0. Inside
    ``eagle_config`` they are layer outputs.
    """
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if "target_layer_ids" in config:
        taps = config["target_layer_ids"]
    elif nested:
        taps = nested
    else:
        default = [2, target_layers // 2, target_layers - 3]
        taps = [tap - 1 for tap in config.get("eagle_aux_hidden_state_layer_ids") or default]
    proposals = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    steps = steps or config.get("ttt_length") or proposals[0].get("speculative_tokens")
    if steps is None:
        raise ValueError("the file does not say how many tokens to draft: pass steps")
    return Layout(with_class_defaults(config.get("transformer_layer_config", config)), taps, steps)


class ReferenceDrafter:
    """A drafter folder in any public layout, computed without a cache.

    Args:
        folder: ``config.json`` and safetensors.
        target: Lends what the drafter does not own: embedding, LM head.
        steps: Draft tokens of an EAGLE-3 drafter whose file does not say.
    """

    def __init__(self, folder: Path, target: ReferenceTarget, steps: int | None = None) -> None:
        config = read_config(folder)
        plain = {key.removeprefix("dspark_"): value for key, value in config.items()}
        self.config = config = plain | config.get("dspark_config", {}) | config.get("dflash_config", {})
        tensors = read_tensors(folder)
        self.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        target_layers = len(target.windows)
        kind = config.get("speculators_model_type")
        if self.tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * len(self.tensors["norm.weight"]):
            layout = _read_eagle3(config, target_layers, steps)
        elif kind in ("dspark", "dflash"):
            layout = _read_speculators_block(config)
        elif "DFlashDraftModel" in config["architectures"]:
            layout = _read_zlab(config, target_layers)
        else:
            layout = _read_deepspec(config)
        self.layout = layout
        self.backbone = layout.backbone
        self.epsilon: float = self.backbone["rms_norm_eps"]
        self.dim: int = self.backbone["head_dim"]
        parameters = self.backbone.get("rope_parameters") or {}
        partial = parameters.get("partial_rotary_factor", self.backbone.get("partial_rotary_factor", 1.0))
        self.rope = Rope(self.backbone, partial)
        if self.rope.kind == "dynamic":
            raise ValueError("a drafter with dynamic RoPE is beyond this reference")
        self.embedding: Array = self.tensors.get("embed_tokens.weight", target.embedding)
        self.head: Array = self.tensors.get("lm_head.weight", target.head)
        self.to_target = np.arange(len(self.head)) + self.tensors.get("d2t", 0)  # d2t holds offsets

    def taps(self, states: Sequence[Array]) -> Array:
        """The tapped hidden states of the target, side by side ``[n, taps·H]``."""
        return np.concatenate([states[tap + 1] for tap in self.layout.tap_ids], axis=-1)

    def draft(self, taps: Array, tokens: Sequence[int]) -> Draft:
        """Draft after ``tokens``, the last of which is the anchor; ``taps [n, taps·H]`` belong to those before it."""
        if len(taps) != len(tokens) - 1:
            raise ValueError(f"{len(taps)} taps do not belong to {len(tokens)} tokens")
        if self.layout.layers is None:
            return self._draft_autoregressively(taps, tokens)
        return self._draft_block(taps, tokens[-1])

    def _norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.epsilon)

    def _heads(self, x: Array, layer: int, which: str) -> Array:
        return heads(x, self.tensors, f"layers.{layer}.self_attn", which, self.dim, self.epsilon)

    def _finish_layer(self, x: Array, layer: int, attended: Array) -> Array:
        """Output projection, residual and MLP."""
        x = x + linear(attended, self.tensors, f"layers.{layer}.self_attn.o_proj")
        normed = self._norm(x, f"layers.{layer}.post_attention_layernorm")
        return x + mlp(normed, self.tensors, f"layers.{layer}.mlp")

    # DSpark and DFlash

    def _draft_block(self, taps: Array, anchor: int) -> Draft:
        start, slots = len(taps), self.layout.block_size
        context = self._norm(linear(taps, self.tensors, "fc"), "hidden_norm")
        x: Array = self.embedding[[anchor] + [self.layout.mask_token_id] * (slots - 1)]
        positions = np.arange(start + slots)
        for layer, (causal, window) in enumerate(self.layout.layers or []):
            normed = self._norm(x, f"layers.{layer}.input_layernorm")
            query = self._heads(normed, layer, "q")
            key, value = (
                np.concatenate([self._heads(part, layer, which) for part in (context, normed)]) for which in "kv"
            )
            query = self.rope.rotate(query, positions[start:], positions[start:])
            key = self.rope.rotate(key, positions, positions)
            attended = attention(query, key, value, self._visible(start, positions, causal, window))
            x = self._finish_layer(x, layer, attended)
        hidden = self._norm(x, "norm")[0 if self.layout.anchor_predicts else 1 :]
        return self._run_heads(hidden, hidden @ self.head.T, anchor)

    @staticmethod
    def _visible(start: int, positions: NDArray[np.int64], causal: bool, window: int | None) -> NDArray[np.bool_]:
        """Which of context and block each slot sees ``[slots, start + slots]``."""
        distance = positions[start:, None] - positions[None, :]
        visible = np.ones(distance.shape, dtype=bool)
        if causal:
            visible &= distance >= 0
        if window is not None:
            visible &= np.abs(distance) < window
        return visible

    def _run_heads(self, hidden: Array, base_logits: Array, anchor: int) -> Draft:
        """The sequential head along the greedy chain, and the confidence head."""
        tokens: list[int] = []
        logits, confidence = [], []
        rank = self.config.get("markov_rank", 0)
        state = np.zeros(rank)
        for slot, base in zip(hidden, base_logits, strict=True):
            previous = tokens[-1] if tokens else anchor
            embedded = self.tensors["markov_head.markov_w1.weight"][previous] if rank else np.zeros(0)
            bias, state = self._bias(slot, embedded, state) if rank else (0.0, state)
            logits.append(base + bias)
            tokens.append(int(self.to_target[logits[-1].argmax()]))
            if self.config.get("enable_confidence_head"):
                seen = [slot, embedded] if self.config.get("confidence_head_with_markov") else [slot]
                confidence.append(linear(np.concatenate(seen), self.tensors, "confidence_head.proj")[0])
        return Draft(hidden, base_logits, tokens, np.array(logits), np.array(confidence) if confidence else None)

    def _bias(self, slot: Array, embedded: Array, state: Array) -> tuple[Array, Array]:
        """What the Markov head adds to a slot's logits ``[V']``, and its next state (RNN only)."""
        match self.config["markov_head_type"]:
            case "vanilla":
                read = embedded
            case "gated":
                joint = np.concatenate([slot, embedded])
                read = sigmoid(linear(joint, self.tensors, "markov_head.gate_proj")) * embedded
            case "rnn":
                joint = linear(np.concatenate([state, embedded, slot]), self.tensors, "markov_head.joint_proj")
                gate, candidate, output = np.split(joint, 3)
                state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
                read = np.tanh(output)
            case unknown:
                raise ValueError(f"unknown markov_head_type {unknown!r}")
        return self.tensors["markov_head.markov_w2.weight"] @ read, state

    # EAGLE-3

    def _draft_autoregressively(self, taps: Array, tokens: Sequence[int]) -> Draft:
        """Position i pairs the feature of token i with the embedding of token i + 1."""
        if self.config.get("norm_before_fc"):
            taps = self._norm(taps, "input_norm")
        if self.config.get("fc_norm"):
            parts = np.split(taps, len(self.layout.tap_ids), axis=-1)
            taps = np.concatenate([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], axis=-1)
        features = linear(taps, self.tensors, "fc")
        following = list(tokens[1:])
        recycled, logits = [], []
        drafted: list[int] = []
        for _ in range(self.layout.block_size):
            hidden = self._eagle_layers(features, self.embedding[following])[-1]
            normed = self._norm(hidden, "norm")
            recycled.append(normed if self.config.get("norm_output") else hidden)  # normed: EAGLE 3.1
            logits.append(normed @ self.head.T)
            drafted.append(int(self.to_target[logits[-1].argmax()]))
            features = np.concatenate([features, recycled[-1][None]])
            following.append(drafted[-1])
        return Draft(np.array(recycled), np.array(logits), drafted, np.array(logits), None)

    def _eagle_layers(self, features: Array, embedded: Array) -> Array:
        """All layers over the paired sequence ``[n, H]``; the first one reads both halves."""
        positions = np.arange(len(features))
        distance = positions[:, None] - positions[None, :]
        windows = _windows(self.backbone) if self.backbone.get("layer_types") else [None]
        x = features
        for layer in range(self.backbone["num_hidden_layers"]):
            visible = (distance >= 0) & (distance < (windows[layer % len(windows)] or np.inf))
            if layer == 0:
                hidden = self._norm(x, "layers.0.hidden_norm")
                x = hidden if self.config.get("norm_before_residual") else x
                normed = np.concatenate([self._norm(embedded, "layers.0.input_layernorm"), hidden], axis=-1)
            else:
                normed = self._norm(x, f"layers.{layer}.input_layernorm")
            query, key, value = (self._heads(normed, layer, which) for which in "qkv")
            query, key = (self.rope.rotate(rows, positions, positions) for rows in (query, key))
            x = self._finish_layer(x, layer, attention(query, key, value, visible))
        return x
