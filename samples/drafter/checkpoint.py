"""Drafters on disk, in DeepSpec's layout, without embedding and LM head: both are the target's."""

import json
from pathlib import Path
from typing import Any

import torch
from drafters import BlockDrafter, Eagle3Drafter
from safetensors.torch import load_file, save_file

__all__ = ["load_checkpoint", "read_config", "save_checkpoint", "unlike"]

DECISIVE = (
    *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "target_layer_ids", "block_size"),
    *("ttt_length", "mask_token_id", "markov_rank", "markov_head_type", "vocab_size"),
)
"""Settings that must agree for weights to mean the same."""


def save_checkpoint(drafter: BlockDrafter | Eagle3Drafter, folder: Path) -> None:
    """Writes ``config.json`` and ``model.safetensors``, in bfloat16."""
    tensors = {name: value.detach().cpu().bfloat16().contiguous() for name, value in drafter.state_dict().items()}
    config, weights = folder / "config.json.partial", folder / "model.partial"
    config.write_text(json.dumps(drafter.config.as_json(), indent=2) + "\n")
    save_file(tensors, weights)
    config.replace(folder / "config.json")
    weights.replace(folder / "model.safetensors")


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json``.

    Raises:
        ValueError: It is no JSON object.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is no JSON object")
    return config


def load_checkpoint(drafter: BlockDrafter | Eagle3Drafter, folder: Path) -> None:
    """Takes the weights of a checkpoint; it may draft a block of another length.

    Raises:
        ValueError: It is a checkpoint of another drafter.
    """
    odd = [name for name in unlike(read_config(folder), drafter.config.as_json()) if name != "block_size"]
    if odd:
        found, wanted = read_config(folder).get(odd[0]), drafter.config.as_json().get(odd[0])
        raise ValueError(f"{folder} is another drafter: its {odd[0]} is {found}, not {wanted}")
    tensors = load_file(folder / "model.safetensors")
    expected = {name: value.shape for name, value in drafter.state_dict().items()}
    wrong = sorted(set(expected.items()) ^ {(name, value.shape) for name, value in tensors.items()})
    if wrong:
        raise ValueError(f"{folder}: {wrong[0][0]} {list(wrong[0][1])} is not in both the file and the drafter")
    drafter.load_state_dict({name: value.to(torch.float32) for name, value in tensors.items()})


def unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the decisive settings in which two configurations differ."""
    return [name for name in DECISIVE if one.get(name) != other.get(name)]
