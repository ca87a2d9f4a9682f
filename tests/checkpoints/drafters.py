"""Drafters in the layouts of DeepSpec, z-lab, speculators and legacy EAGLE-3.

All take the folder of their target, whose embedding and LM head they share, borrow or cut. Keyword arguments that are
not named here are keys of ``config.json``; OMIT leaves one out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..reference.folder import CLASS_DEFAULTS, read_config, read_tensors
from .weights import Tensors, Weights, override, write_folder

__all__ = ["write_deepspec", "write_eagle3", "write_speculators", "write_zlab_dflash"]


def _backbone(target: Path, layers: int, model_type: str = "qwen3") -> dict[str, Any]:
    """The nested or inherited configuration of a drafter for ``target``."""
    config = read_config(target)
    return {
        "model_type": model_type,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _embedding_and_head(target: Path) -> tuple[Any, Any]:
    tensors = read_tensors(target)
    embedding = tensors["model.embed_tokens.weight"]
    return embedding, tensors.get("lm_head.weight", embedding)


def _block_tensors(weights: Weights, config: dict[str, Any], taps: int) -> Tensors:
    """``fc``, norms and layers of a DSpark or DFlash drafter."""
    hidden = config["hidden_size"]
    tensors = {
        "fc.weight": weights.matrix(hidden, taps * hidden),
        "hidden_norm.weight": weights.vector(hidden, 1.0),
        "norm.weight": weights.vector(hidden, 1.0),
    }
    for layer in range(config["num_hidden_layers"]):
        tensors |= weights.layer(f"layers.{layer}", config, 0.3, "qkvo" * config.get("attention_bias", False), True)
    weights.copy_neighbours(tensors, "layers.0", config)
    return tensors


def _head_tensors(weights: Weights, target: Path, head: str, rank: int, confidence: str, rows: Any) -> Tensors:
    """Markov and confidence head; ``rows`` are the target ids of the draft vocabulary."""
    embedding, lm_head = _embedding_and_head(target)
    hidden = embedding.shape[1]
    tensors: Tensors = {}
    if head != "none":
        project = weights.matrix(hidden, rank, gain=np.sqrt(rank)) * 2 / np.sqrt(hidden)
        tensors["markov_head.markov_w1.weight"] = embedding @ project
        tensors["markov_head.markov_w2.weight"] = lm_head[rows] @ project
    if head == "gated":
        tensors["markov_head.gate_proj.weight"] = weights.matrix(rank, hidden + rank)
        tensors["markov_head.gate_proj.bias"] = weights.vector(rank, mean=2.0)
    if head == "rnn":
        joint = weights.matrix(3 * rank, 2 * rank + hidden, gain=0.7)
        joint[2 * rank :, rank : 2 * rank] += np.eye(rank)
        tensors["markov_head.joint_proj.weight"] = joint
        tensors["markov_head.joint_proj.bias"] = weights.vector(3 * rank)
    if confidence != "none":
        width = hidden + rank if confidence == "markov" else hidden
        tensors["confidence_head.proj.weight"] = weights.matrix(1, width)
        tensors["confidence_head.proj.bias"] = weights.vector(1, mean=0.5)
    return tensors


def _head_config(head: str, rank: int, confidence: str) -> dict[str, Any]:
    config: dict[str, Any] = {"markov_rank": 0 if head == "none" else rank}
    if head != "none":
        config["markov_head_type"] = head
    config["enable_confidence_head"] = confidence != "none"
    if confidence != "none":
        config["confidence_head_with_markov"] = confidence == "markov"
    return config


def _draft_vocabulary(weights: Weights, size: int | None, vocabulary: int) -> tuple[Any, Tensors]:
    """Target ids of the draft vocabulary, and the tables ``d2t`` and ``t2d`` if it is a reduced one."""
    if size is None:
        return np.arange(vocabulary), {}
    rows = np.sort(weights.random.permutation(vocabulary)[:size])
    return rows, {"d2t": rows - np.arange(size), "t2d": np.isin(np.arange(vocabulary), rows)}


def _as_difference(config: dict[str, Any]) -> dict[str, Any]:
    """Only what its configuration class would not assume by itself."""
    assumed = CLASS_DEFAULTS[config["model_type"]]
    return {key: value for key, value in config.items() if key not in assumed or assumed[key] != value}


def _speculators_config(kind: str, architecture: str, target: Path, tokens: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": target.name, "architectures": read_config(target)["architectures"]},
        },
    }


def write_deepspec(
    folder: Path,
    target: Path,
    *,
    head: str = "rnn",
    confidence: str = "markov",
    rank: int = 16,
    block_size: int = 5,
    taps: Sequence[int] = (0, 1, 2),
    layers: int = 2,
    own_embedding: bool = True,
    seed: int = 1,
    dtype: str = "float32",
    shards: int = 1,
    **changes: Any,
) -> Path:
    """Write a DeepSpec DSpark drafter, or DFlash with ``head="none", confidence="none"``.

    Args:
        head: ``none``, ``vanilla``, ``gated`` or ``rnn``.
        confidence: What the confidence head reads: ``none`` (no such head), ``hidden`` or ``markov`` (both).
        own_embedding: Whether embedding and LM head are in the file. They differ a little from the target's.
    """
    weights, backbone = Weights(seed), _backbone(target, layers)
    vocabulary, hidden = backbone["vocab_size"], backbone["hidden_size"]
    config = backbone | {
        "architectures": ["Qwen3DSparkModel"],
        "layer_types": ["full_attention"] * layers,
        "num_target_layers": read_config(target)["num_hidden_layers"],
        "target_layer_ids": list(taps),
        "block_size": block_size,
        "mask_token_id": vocabulary - 1,
        "num_anchors": 8,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **_head_config(head, rank, confidence),
    }
    config = override(config, changes)
    tensors = _block_tensors(weights, config, len(taps))
    tensors |= _head_tensors(weights, target, head, rank, confidence, np.arange(vocabulary))
    if own_embedding:
        for name, tensor in zip(("embed_tokens", "lm_head"), _embedding_and_head(target), strict=True):
            tensors[f"{name}.weight"] = tensor + weights.matrix(vocabulary, hidden, gain=0.2)
    return write_folder(folder, config, tensors, dtype, shards)


def write_zlab_dflash(
    folder: Path,
    target: Path,
    *,
    block_size: int = 5,
    taps: Sequence[int] | None = (0, 1, 2),
    layers: int = 2,
    dflash: dict[str, Any] | None = None,
    seed: int = 1,
    dtype: str = "float32",
    **changes: Any,
) -> Path:
    """Write a z-lab DFlash drafter: block size at top level, embedding and LM head borrowed.

    Args:
        taps: None leaves them out of the file: one a draft layer, spread over the target from layer 1 to N − 3.
        dflash: More keys of ``dflash_config``, such as ``block_size`` or ``causal``.
    """
    weights, backbone = Weights(seed), _backbone(target, layers)
    own = {"mask_token_id": backbone["vocab_size"] - 1} | ({} if taps is None else {"target_layer_ids": list(taps)})
    config = backbone | {
        "architectures": ["DFlashDraftModel"],
        "layer_types": ["full_attention"] * layers,
        "num_target_layers": read_config(target)["num_hidden_layers"],
        "block_size": block_size,
        "dflash_config": own | (dflash or {}),
        "dtype": dtype,
    }
    config = override(config, changes)
    return write_folder(folder, config, _block_tensors(weights, config, layers if taps is None else len(taps)), dtype)


def write_speculators(
    folder: Path,
    target: Path,
    *,
    kind: str = "dspark",
    draft_vocab: int | None = None,
    head: str = "vanilla",
    confidence: str = "markov",
    rank: int = 16,
    block_size: int = 5,
    taps: Sequence[int] = (0, 1, 2),
    layers: int = 2,
    backbone_changes: dict[str, Any] | None = None,
    seed: int = 1,
    dtype: str = "float32",
    **changes: Any,
) -> Path:
    """Write a DSpark or DFlash drafter as the speculators library does: taps + 1, no embedding.

    Args:
        kind: ``dspark`` or ``dflash`` (which has neither head).
        draft_vocab: Size of a reduced vocabulary; its rows of the LM head are then in the file.
        taps: Layer outputs, without the + 1.
        backbone_changes: Keys of ``transformer_layer_config``, which is written as a difference from its class.
    """
    weights = Weights(seed)
    backbone = _backbone(target, layers) | {"layer_types": ["full_attention"] * layers}
    backbone = override(backbone, backbone_changes or {})
    if kind == "dflash":
        head, confidence = "none", "none"
    anchor = changes.get("sample_from_anchor", kind == "dspark") is True
    name = {"dspark": "DSparkDraftModel", "dflash": "DFlashSpeculator"}[kind]
    config = _speculators_config(kind, name, target, block_size if anchor else block_size - 1) | {
        "transformer_layer_config": _as_difference(backbone),
        "draft_vocab_size": draft_vocab or backbone["vocab_size"],
        "block_size": block_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "mask_token_id": backbone["vocab_size"] - 1,
        "sample_from_anchor": anchor,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **(_head_config(head, rank, confidence) if kind == "dspark" else {}),
    }
    tensors = _block_tensors(weights, backbone, len(taps))
    rows, tables = _draft_vocabulary(weights, draft_vocab, backbone["vocab_size"])
    tensors |= tables | _head_tensors(weights, target, head, rank, confidence, rows)
    if draft_vocab is not None:
        tensors["lm_head.weight"] = _embedding_and_head(target)[1][rows]
    return write_folder(folder, override(config, changes), tensors, dtype)


def write_eagle3(
    folder: Path,
    target: Path,
    *,
    layout: str = "speculators",
    draft_vocab: int | None = None,
    steps: int = 4,
    taps: Sequence[int] | None = None,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    seed: int = 1,
    dtype: str = "float32",
    **changes: Any,
) -> Path:
    """Write an EAGLE-3 drafter.

    Args:
        layout: ``deepspec`` (full vocabulary, QK-norm), ``speculators``, or ``legacy`` (``midlayer.*``; its file does
            not say how many tokens to draft).
        taps: Layer outputs, written in the layout's convention; (0, 1, 2) by default, the first five for DeepSpec.
            Of a legacy file they are left out if they are the default (2, N/2, N − 3) − 1.
        norm_before_residual, norm_before_fc, fc_norm: Flags of the speculators layout.
    """
    weights, model_type = Weights(seed), "qwen3" if layout == "deepspec" else "llama"
    backbone = _backbone(target, 1, model_type)
    hidden, vocabulary = backbone["hidden_size"], backbone["vocab_size"]
    taps = list(taps or range(5 if layout == "deepspec" else 3))
    target_layers = read_config(target)["num_hidden_layers"]
    rows, tables = _draft_vocabulary(weights, draft_vocab, vocabulary)
    if layout == "deepspec":
        config = backbone | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": taps, "ttt_length": steps}
        config |= {"draft_num_hidden_layers": 1, "num_target_layers": target_layers}
    elif layout == "speculators":
        config = _speculators_config("eagle3", "Eagle3Speculator", target, steps) | {
            "transformer_layer_config": _as_difference(backbone),
            "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
            "draft_vocab_size": len(rows),
            "norm_before_residual": norm_before_residual,
            "norm_before_fc": norm_before_fc,
            "fc_norm": fc_norm,
        }
    else:
        config = backbone | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(rows)}
        if taps != [1, target_layers // 2 - 1, target_layers - 4]:
            config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": taps}

    embedding, lm_head = _embedding_and_head(target)
    name = "midlayer" if layout == "legacy" else "layers.0"
    tensors = {
        "fc.weight": weights.matrix(hidden, len(taps) * hidden, gain=0.3),
        "norm.weight": weights.vector(hidden, 1.0),
        f"{name}.hidden_norm.weight": weights.vector(hidden, 1.0),
        **weights.layer(name, backbone, 0.3, qk_norm=layout == "deepspec", wide=2),
        "lm_head.weight": lm_head[rows],
        **tables,
    }
    weights.copy_neighbours(tensors, name, backbone)
    if layout != "speculators":
        tensors["embed_tokens.weight"] = embedding + weights.matrix(vocabulary, hidden, gain=0.2)
    if norm_before_fc:
        tensors["input_norm.weight"] = weights.vector(len(taps) * hidden, 1.0)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": weights.vector(hidden, 1.0) for i in range(len(taps))}
    return write_folder(folder, override(config | {"dtype": dtype}, changes), tensors, dtype)
