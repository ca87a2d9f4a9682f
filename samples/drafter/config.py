"""What a drafter is: its sizes, and the ``config.json`` that says so in DeepSpec's layout."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dspark.exporter.checkpoints.description import DrafterKind

__all__ = ["DraftConfig", "HeadKind", "spread_taps"]


class HeadKind(StrEnum):
    """The sequential heads (paper, section on the Markov head)."""

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


def spread_taps(target_layers: int, count: int = 5) -> tuple[int, ...]:
    """Layer outputs spread evenly from the second layer to the third from the end, as DeepSpec chooses them."""
    last = max(1, target_layers - 3)
    return tuple(sorted({1 + round((last - 1) * index / (count - 1)) for index in range(count)}))


@dataclass(frozen=True)
class DraftConfig:
    """A drafter.

    Attributes:
        kind: How it proposes.
        target_layers: Layers of the target.
        hidden_size: The target's, as embedding and LM head are the target's.
        intermediate_size: Width of the MLPs.
        attention_heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Size of a head.
        norm_epsilon: Of every RMSNorm.
        rope_theta: RoPE's base.
        context_length: Longest text in tokens.
        vocabulary_size: The target's.
        stop_token_id: The target's; None if it has none.
        layers: Decoder layers; 1 for EAGLE-3.
        block_size: Draft tokens, γ.
        taps: Layer outputs of the target that it reads.
        mask_token_id: Fills the slots after the anchor.
        head: The sequential head of DSpark.
        markov_rank: Its rank.
    """

    kind: DrafterKind
    target_layers: int
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    context_length: int
    vocabulary_size: int
    stop_token_id: int | None
    layers: int
    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    head: HeadKind
    markov_rank: int

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 32:
            raise ValueError(f"block_size is {self.block_size}; it must be from 1 to 32")
        if self.kind is DrafterKind.EAGLE3 and self.layers != 1:
            raise ValueError(f"an EAGLE-3 drafter has 1 layer, not {self.layers}")
        if not 1 <= self.layers <= self.target_layers:
            raise ValueError(f"a drafter has from 1 to {self.target_layers} layers, not {self.layers}")
        if self.kind is DrafterKind.DSPARK and self.markov_rank < 1:
            raise ValueError(f"a DSpark drafter has a Markov rank of at least 1, not {self.markov_rank}")
        if not 0 <= self.mask_token_id < self.vocabulary_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; the vocabulary has {self.vocabulary_size} tokens")
        last = self.target_layers - 2
        increasing = self.taps and list(self.taps) == sorted(set(self.taps))
        if not increasing or not -1 <= self.taps[0] <= self.taps[-1] <= last:
            raise ValueError(f"taps are {list(self.taps)}; they must increase and lie between -1 and {last}")

    def as_json(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        common = {
            "architectures": ["Qwen3Eagle3Model" if self.kind is DrafterKind.EAGLE3 else "Qwen3DSparkModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "attention_bias": False,
            "eos_token_id": self.stop_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.layers,
            "max_position_embeddings": self.context_length,
            "num_attention_heads": self.attention_heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_target_layers": self.target_layers,
            "rms_norm_eps": self.norm_epsilon,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "sliding_window": None,
            "target_layer_ids": list(self.taps),
            "tie_word_embeddings": False,
            "vocab_size": self.vocabulary_size,
        }
        match self.kind:
            case DrafterKind.EAGLE3:
                return common | {"draft_num_hidden_layers": self.layers, "ttt_length": self.block_size}
            case DrafterKind.DFLASH:
                head: dict[str, Any] = {"markov_rank": 0, "enable_confidence_head": False}
            case DrafterKind.DSPARK:
                head = {
                    "markov_rank": self.markov_rank,
                    "markov_head_type": self.head.value,
                    "enable_confidence_head": True,
                    "confidence_head_with_markov": True,
                }
        return common | {"block_size": self.block_size, "mask_token_id": self.mask_token_id} | head
