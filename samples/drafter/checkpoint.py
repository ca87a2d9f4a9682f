"""Drafters on disk, in DeepSpec's layout, without embedding and LM head: both are the target's."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from drafters import Drafter
from safetensors.torch import load_file, save

from dspark.runtime.bundle.files import write_whole

__all__ = ["check_same_drafter", "load_checkpoint", "read_config", "save_checkpoint"]

DECISIVE = (
    *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "target_layer_ids", "block_size"),
    *("ttt_length", "mask_token_id", "markov_rank", "markov_head_type", "vocab_size"),
)
"""Settings that must agree for weights to mean the same."""
ADDING = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""Weights through which a layer adds to the hidden state."""


def save_checkpoint(drafter: Drafter, folder: Path) -> None:
    """Writes ``config.json`` and ``model.safetensors``, in bfloat16."""
    tensors = {name: value.detach().cpu().bfloat16().contiguous() for name, value in drafter.state_dict().items()}
    write_whole(folder / "config.json", f"{json.dumps(drafter.config.as_json(), indent=2)}\n".encode())
    write_whole(folder / "model.safetensors", save(tensors))


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json``.

    Raises:
        ValueError: It is no JSON object.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is no JSON object")
    return config


def check_same_drafter(
    found: Mapping[str, Any], drafter: Drafter, told: str, advice: str = "", free: Collection[str] = ()
) -> None:
    """Refuses a configuration that differs from a drafter's where it matters.

    Args:
        found: The configuration.
        drafter: The drafter.
        told: How the message begins; the setting's name follows.
        advice: How it ends.
        free: Settings that may differ.

    Raises:
        ValueError: They differ; names the first setting and both values.
    """
    wanted = drafter.config.as_json()
    for name in DECISIVE:
        if name not in free and found.get(name) != wanted.get(name):
            raise ValueError(f"{told} {name} is {found.get(name)}, not {wanted.get(name)}{advice}")


def load_checkpoint(drafter: Drafter, folder: Path) -> None:
    """Takes the weights of a checkpoint; it may draft a block of another length, and have fewer layers.

    Layers that it lacks come last and keep their weights, but for those that add to the hidden state: these become
    zero, so that the drafter begins as the checkpoint's equal.

    Raises:
        ValueError: It is a checkpoint of another drafter.
    """
    config = read_config(folder)
    check_same_drafter(config, drafter, f"{folder} is another drafter: its", free=("block_size", "num_hidden_layers"))
    tensors = load_file(folder / "model.safetensors")
    layers = config.get("num_hidden_layers")
    added = {
        name: torch.zeros_like(value) if name.endswith(ADDING) else value
        for name, value in drafter.state_dict().items()
        if isinstance(layers, int) and name.startswith("layers.") and int(name.split(".")[1]) >= layers
    }
    expected = {(name, value.shape) for name, value in drafter.state_dict().items()}
    wrong = sorted(expected ^ {(name, value.shape) for name, value in (added | tensors).items()})
    if wrong:
        raise ValueError(f"{folder}: {wrong[0][0]} {list(wrong[0][1])} is not in both the file and the drafter")
    drafter.load_state_dict(added | tensors)
