"""What a bundle's graphs have to compute, in PyTorch: the target by transformers, the drafter from its definition.

Everything is recomputed from whole sequences of one request, without a cache. Results carry the names and shapes of the
graphs' outputs (docs/reference/graphs.md). Importing this module imports PyTorch.
"""

from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dspark.exporter.checkpoints.description import ConfidenceInput, Drafter, HeadKind, Layer, Rope, Target
from dspark.exporter.checkpoints.gguf_file import is_gguf_file, read_gguf_file
from dspark.exporter.errors import ExportError
from dspark.exporter.exported_graphs import Arrays
from dspark.runtime.bundle.contract import CANDIDATES, FEATURE, context_names

__all__ = ["BlockReference", "Eagle3Reference", "TargetReference", "load_target_model"]


def load_target_model(source: Path, target: Target, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """Loads a target as a transformers model, frozen.

    Args:
        source: The Hugging Face folder or GGUF file.
        target: Its description, for what transformers does not read from GGUF files.
        dtype: Of its weights.
        attention: Implementation of attention.

    Raises:
        ExportError: transformers cannot load the checkpoint.
    """
    options = {"dtype": dtype, "attn_implementation": attention}
    try:
        with redirect_stderr(StringIO()):  # progress bars, which would break into those of the caller
            model = _load_gguf(source, target, options) if is_gguf_file(source) else _load(source, options)
    except (OSError, RuntimeError, ValueError) as error:
        raise ExportError(f"{source}: transformers cannot load it: {error}") from error
    return model.requires_grad_(False)


class TargetReference:
    """The target as transformers reads it from the checkpoint itself, in float32 with eager attention.

    Args:
        source: The Hugging Face folder or GGUF file that was exported.
        target: Its description, for what transformers does not read from GGUF files.

    Attributes:
        tables: Embedding and LM head, which drafters may borrow.

    Raises:
        ExportError: transformers cannot load the checkpoint.
    """

    def __init__(self, source: Path, target: Target) -> None:
        self._model = model = load_target_model(source, target, torch.float32, attention="eager")
        self.tables: Mapping[str, Tensor] = {
            "embed_tokens.weight": model.get_input_embeddings().weight,
            "lm_head.weight": model.get_output_embeddings().weight,
        }

    def forward(self, ids: NDArray[Any]) -> tuple[NDArray[Any], Sequence[Tensor]]:
        """One pass over a text ``[n]``.

        Returns:
            Logits ``[n, V]``; hidden states ``[n, H]``: the embedding output and the output of every layer, the last of
            which is normed.
        """
        output = self._model(torch.from_numpy(ids)[None], use_cache=False, output_hidden_states=True)
        return output.logits[0].numpy(), [state[0] for state in output.hidden_states]


class _DrafterReference:
    """What block drafters and EAGLE-3 have in common.

    Args:
        drafter: Its configuration and tensors.
        tables: The target's embedding and LM head.

    Attributes:
        vocabulary: The target id of every draft id.
    """

    def __init__(self, drafter: Drafter, tables: Mapping[str, Tensor]) -> None:
        own = {name: torch.from_numpy(tensor.load()) for name, tensor in drafter.tensors.items()}
        self._drafter = drafter
        self._backbone = drafter.backbone
        self._tensors = {**tables, **own}
        reduced = drafter.draft_vocabulary
        self.vocabulary = np.arange(drafter.vocabulary_size) if reduced is None else reduced

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """Projected taps ``[n, H]`` of the target's hidden states (docs/explanation/graphs.md)."""
        taps = [states[tap + 1] for tap in self._drafter.taps]
        if self._drafter.fc_norm:
            taps = [self._norm(tap, f"fc_norm.{index}") for index, tap in enumerate(taps)]
        joined = torch.cat(taps, dim=-1)
        if self._drafter.norm_before_fc:
            joined = self._norm(joined, "input_norm")
        return self._linear(joined, "fc")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self._backbone.norm_epsilon)

    def _embed(self, ids: Sequence[int]) -> Tensor:
        return F.embedding(torch.tensor(ids), self._tensors["embed_tokens.weight"])

    def _heads(self, x: Tensor, layer: int, letter: str, positions: Tensor) -> Tensor:
        """Queries, keys or values ``[heads, n, D]``; queries and keys are normed if the model does so, and rotated."""
        name = f"layers.{layer}.self_attn.{letter}"
        heads = self._linear(x, f"{name}_proj").reshape(len(x), -1, self._backbone.head_dim)
        if f"{name}_norm.weight" in self._tensors:
            heads = self._norm(heads, f"{name}_norm")
        heads = heads.transpose(0, 1)
        return heads if letter == "v" else _rotate(heads, self._backbone.rope, positions)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """Attention's output ``[n, H]``."""
        mixed = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=visible, enable_gqa=True)
        return self._linear(mixed[0].transpose(0, 1).flatten(-2), f"layers.{layer}.self_attn.o_proj")

    def _feed_forward(self, x: Tensor, layer: int) -> Tensor:
        """``x`` plus what the layer's gated MLP makes of it."""
        normed = self._norm(x, f"layers.{layer}.post_attention_layernorm")
        gate, up = (self._linear(normed, f"layers.{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return x + self._linear(F.silu(gate) * up, f"layers.{layer}.mlp.down_proj")


class BlockReference(_DrafterReference):
    """DSpark and DFlash (docs/explanation/algorithm.md, "The drafters")."""

    def context(self, states: Sequence[Tensor]) -> Arrays:
        """Context keys and values ``[1, Hkv, n, D]`` of every draft layer."""
        features = self._norm(self.features(states), "hidden_norm")
        positions = torch.arange(len(features))
        return {
            name: self._heads(features, layer, letter, positions)[None].numpy()
            for layer in range(len(self._backbone.layers))
            for letter, name in zip("kv", context_names(layer), strict=True)
        }

    def block(self, context: Arrays, anchor: int) -> Arrays:
        """The block after ``n`` tokens of context: ``hidden [1, γ, H]`` and ``base_logits [1, γ, K]``.

        With a top-k also ``candidates [1, γ, K]``, the draft ids of the base logits.
        """
        drafter = self._drafter
        assert drafter.mask_token_id is not None
        x = self._embed([anchor] + [drafter.mask_token_id] * (drafter.block_size - 1))
        start = context[context_names(0)[0]].shape[2]
        positions = torch.arange(start + drafter.block_size)
        slots = positions[start:]
        for index, layer in enumerate(self._backbone.layers):
            normed = self._norm(x, f"layers.{index}.input_layernorm")
            query, key, value = (self._heads(normed, index, letter, slots) for letter in "qkv")
            before_key, before_value = (torch.from_numpy(context[name][0]) for name in context_names(index))
            key, value = torch.cat([before_key, key], dim=1), torch.cat([before_value, value], dim=1)
            x = x + self._attend(index, query, key, value, _visible(layer, slots, positions))
            x = self._feed_forward(x, index)
        hidden = self._norm(x, "norm")[-drafter.draft_length :]
        logits, candidates = self._linear(hidden, "lm_head"), {}
        if drafter.top_k is not None:
            logits, ids = logits.topk(drafter.top_k, dim=-1)
            candidates[CANDIDATES] = ids[None].numpy()
        return {"hidden": hidden[None].numpy(), "base_logits": logits[None].numpy(), **candidates}

    def heads(self, block: Arrays, anchor: int, tokens: Sequence[int]) -> Arrays:
        """``draft_logits [1, γ, K]`` and, with such a head, ``confidence [1, γ]`` along given draft tokens."""
        hidden, logits = (torch.from_numpy(block[name][0]) for name in ("hidden", "base_logits"))
        confidence_input = [hidden]
        if self._drafter.head is not HeadKind.NONE:
            previous = torch.tensor([anchor, *tokens[:-1]])
            embedded = F.embedding(previous, self._tensors["markov_head.markov_w1.weight"])
            bias = self._linear(self._markov_factors(hidden, embedded), "markov_head.markov_w2")
            logits = logits + (
                bias if CANDIDATES not in block else bias.gather(1, torch.from_numpy(block[CANDIDATES][0]))
            )
            if self._drafter.confidence is ConfidenceInput.HIDDEN_AND_MARKOV:
                confidence_input.append(embedded)
        outputs = {"draft_logits": logits[None].numpy()}
        if self._drafter.confidence is not ConfidenceInput.NONE:
            confidence = self._linear(torch.cat(confidence_input, dim=-1), "confidence_head.proj")
            outputs["confidence"] = confidence.transpose(0, 1).numpy()
        return outputs

    def _markov_factors(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What ``W2`` turns into the bias, ``[γ, r]``."""
        match self._drafter.head:
            case HeadKind.GATED:
                gate = self._linear(torch.cat([hidden, embedded], dim=-1), "markov_head.gate_proj")
                return gate.sigmoid() * embedded
            case HeadKind.RNN:
                state, outputs = torch.zeros_like(embedded[0]), []
                for slot, previous in zip(hidden, embedded, strict=True):
                    joint = self._linear(torch.cat([state, previous, slot]), "markov_head.joint_proj")
                    gate, candidate, output = joint.chunk(3)
                    state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                    outputs.append(output.tanh())
                return torch.stack(outputs)
            case _:
                return embedded


class Eagle3Reference(_DrafterReference):
    """EAGLE-3 (docs/explanation/algorithm.md, "The drafters")."""

    def context(self, states: Sequence[Tensor]) -> Arrays:
        """The feature ``[n, H]`` of every token."""
        return {FEATURE: self.features(states).numpy()}

    def steps(self, context: Arrays, following: Sequence[int], tokens: Sequence[int]) -> Arrays:
        """``draft_logits [1, γ, V']`` along given draft tokens.

        Args:
            context: What ``context`` returned for n tokens.
            following: The token after each of them.
            tokens: The draft tokens.
        """
        features, ids = torch.from_numpy(context[FEATURE]), list(following)
        logits = []
        for token in tokens:
            hidden = self._hidden(features, ids)[-1:]
            logits.append(self._linear(self._norm(hidden, "norm"), "lm_head"))
            features, ids = torch.cat([features, hidden]), [*ids, token]
        return {"draft_logits": torch.cat(logits)[None].numpy()}

    def _hidden(self, features: Tensor, ids: Sequence[int]) -> Tensor:
        """Pre-norm hidden states ``[n, H]`` of features, each paired with the token after it."""
        positions = torch.arange(len(ids))
        x = features
        for index, layer in enumerate(self._backbone.layers):
            name = f"layers.{index}.input_layernorm"
            if index == 0:
                normed_features = self._norm(x, "layers.0.hidden_norm")
                x = normed_features if self._drafter.norm_before_residual else x
                normed = torch.cat([self._norm(self._embed(ids), name), normed_features], dim=-1)
            else:
                normed = self._norm(x, name)
            query, key, value = (self._heads(normed, index, letter, positions) for letter in "qkv")
            x = x + self._attend(index, query, key, value, _visible(layer, positions, positions))
            x = self._feed_forward(x, index)
        return x


def _visible(layer: Layer, queries: Tensor, keys: Tensor) -> Tensor:
    """Which keys each query sees, ``[queries, keys]``, given the positions of both."""
    distance = queries[:, None] - keys
    visible = distance >= 0 if layer.causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if layer.window is None else visible & (distance.abs() < layer.window)


def _rotate(heads: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Rotates ``[heads, n, D]`` in half-split pairs; dimensions past ``rotary_dim`` pass through."""
    frequencies = torch.tensor(rope.inverse_frequencies)
    if rope.dynamic is not None:
        scaling, dim = rope.dynamic, rope.rotary_dim
        lengths = (positions[:, None] + 1).clamp(min=scaling.original_length)
        growth = scaling.factor * lengths / scaling.original_length - (scaling.factor - 1)
        frequencies = (scaling.theta * growth ** (dim / (dim - 2))) ** -(torch.arange(0, dim, 2) / dim)
    angles = positions[:, None] * frequencies
    turns = torch.polar(torch.full_like(angles, rope.magnitude), angles)
    first, second, rest = heads.tensor_split([rope.rotary_dim // 2, rope.rotary_dim], dim=-1)
    turned = torch.complex(first, second) * turns
    return torch.cat([turned.real, turned.imag, rest], dim=-1)


def _load(folder: Path, options: Mapping[str, Any]) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)


def _load_gguf(file: Path, target: Target, options: Mapping[str, Any]) -> Any:
    """Loads a GGUF file, and fills in what transformers does not read from one: head size, biases, RoPE scaling."""
    backbone = target.backbone
    if any(layer.window is not None for layer in backbone.layers):
        raise ExportError(
            f"{file}: transformers reads no sliding windows from GGUF files; verify with its Hugging Face folder"
        )
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    config.head_dim = backbone.head_dim
    config.attention_bias = "layers.0.self_attn.o_proj.bias" in target.tensors
    config.mlp_bias = "layers.0.mlp.down_proj.bias" in target.tensors
    options = {**options, "gguf_file": file.name, "config": config}
    if hasattr(transformers, "GgufConfig"):  # later versions unpack weights anew in every product, unless told not to
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = _load(file.parent, options)
    header = read_gguf_file(file)
    if "rope_freqs.weight" in header.tensors or any(".rope.scaling." in key for key in header.metadata):
        model.model.rotary_emb.inv_freq = torch.tensor(backbone.rope.inverse_frequencies)
        model.model.rotary_emb.attention_scaling = backbone.rope.magnitude
    return model
