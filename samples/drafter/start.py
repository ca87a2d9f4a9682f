"""Where training starts: layers of the target itself."""

from collections.abc import Sequence

import torch
from drafters import Drafter
from torch import nn

from dspark.exporter.checkpoints.description import DrafterKind

__all__ = ["start_from_target"]

COPIED = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


@torch.no_grad()
def start_from_target(drafter: Drafter, target: nn.Module, layers: Sequence[int]) -> None:
    """Copies layers and the final norm of the target, and lets the context be the last tap to begin with.

    Args:
        drafter: The untrained drafter.
        target: A transformers model.
        layers: Which layers, one for each of the drafter's.
    """
    config = drafter.config
    parameters = dict(target.named_parameters())
    own = dict(drafter.named_parameters())
    for index, layer in enumerate(layers):
        for name in COPIED:
            stored = parameters.get(f"model.layers.{layer}.{name}")
            if stored is None:  # not all targets norm queries and keys
                continue
            value = stored.float()
            mine = own[f"layers.{index}.{name}"]
            if mine.shape[-1] == 2 * value.shape[-1]:  # EAGLE-3 reads token and feature side by side
                value = torch.cat([value / 2, value / 2], dim=-1)
            mine.copy_(value)
    own["norm.weight"].copy_(parameters["model.norm.weight"].float())
    first = parameters[f"model.layers.{layers[0]}.input_layernorm.weight"].float()
    own["layers.0.hidden_norm.weight" if config.kind is DrafterKind.EAGLE3 else "hidden_norm.weight"].copy_(first)
    drafter.fc.weight.normal_(std=0.1 / drafter.fc.in_features**0.5)
    drafter.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
