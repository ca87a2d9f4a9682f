"""Target models: Llama, Mistral, Qwen2 and Qwen3."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .folder import read_config, read_tensors, with_class_defaults
from .layers import Array, attention, heads, linear, mlp, rms_norm
from .rope import Rope

__all__ = ["ReferenceTarget"]


class ReferenceTarget:
    """A Hugging Face folder, computed without a cache.

    Args:
        folder: ``config.json`` and safetensors, one file or shards.
    """

    def __init__(self, folder: Path) -> None:
        self.config = with_class_defaults(read_config(folder))
        tensors = read_tensors(folder)
        self.embedding: Array = tensors["model.embed_tokens.weight"]
        self.head: Array = self.embedding if self.config["tie_word_embeddings"] else tensors["lm_head.weight"]
        self.tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        self.rope = Rope(self.config)
        self.windows = self._windows()

    def _windows(self) -> list[int | None]:
        """The sliding window of every layer, the token itself included; None sees all."""
        config, count = self.config, self.config["num_hidden_layers"]
        window: int | None = config.get("sliding_window")
        if config["model_type"] == "llama" or window is None:
            return [None] * count
        if config["model_type"] == "mistral":
            return [window] * count
        if not config["use_sliding_window"]:
            return [None] * count
        kinds = config.get("layer_types") or [
            "sliding_attention" if layer >= config["max_window_layers"] else "full_attention" for layer in range(count)
        ]
        return [window if kind == "sliding_attention" else None for kind in kinds]

    def forward(
        self, ids: Sequence[int], positions: NDArray[np.int64] | None = None, prefill: int | None = None
    ) -> tuple[Array, list[Array]]:
        """One pass over the whole text.

        Args:
            ids: Token ids ``[n]``.
            positions: Their positions; 0, 1, … by default.
            prefill: How many tokens came in the first pass, if the rest followed one at a time. Dynamic NTK rotates the
                first ones for that length, each later one for the length at its own turn, and never again.

        Returns:
            Logits ``[n, V]``, and the hidden states ``[n, H]``: embedding output, then the raw output of every layer.
        """
        positions = np.arange(len(ids)) if positions is None else positions
        lengths = np.maximum(positions + 1, len(ids) if prefill is None else prefill)
        epsilon, dim = self.config["rms_norm_eps"], self.config["head_dim"]
        distance = positions[:, None] - positions[None, :]
        x: Array = self.embedding[np.asarray(ids)]
        states = [x]
        for layer, window in enumerate(self.windows):
            name = f"layers.{layer}"
            visible = (distance >= 0) & (distance < (window or np.inf))
            normed = rms_norm(x, self.tensors[f"{name}.input_layernorm.weight"], epsilon)
            q, k, v = (heads(normed, self.tensors, f"{name}.self_attn", which, dim, epsilon) for which in "qkv")
            q, k = self.rope.rotate(q, positions, lengths), self.rope.rotate(k, positions, lengths)
            x = x + linear(attention(q, k, v, visible), self.tensors, f"{name}.self_attn.o_proj")
            normed = rms_norm(x, self.tensors[f"{name}.post_attention_layernorm.weight"], epsilon)
            x = x + mlp(normed, self.tensors, f"{name}.mlp")
            states.append(x)
        return rms_norm(x, self.tensors["norm.weight"], epsilon) @ self.head.T, states
