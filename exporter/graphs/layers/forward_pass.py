"""One pass of some tokens through a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from dspark.exporter.graphs.layers.attention_bias import AttentionBias
from dspark.exporter.graphs.layers.key_values import KeyValue
from dspark.exporter.graphs.layers.model import Model
from dspark.exporter.graphs.layers.rotary import Rotation
from dspark.exporter.graphs.layers.token_layout import TokenLayout

__all__ = ["Extend", "ForwardPass", "after"]

Extend = Callable[[int, KeyValue], Sequence[KeyValue]]
"""From a layer's index and the tokens' own keys and values there to all that they attend to, in the bias's order."""


@dataclass(frozen=True)
class ForwardPass:
    """What is the same for all layers that the tokens of a pass go through.

    Attributes:
        model: The model.
        rotation: The tokens' rotation.
        layout: How they are regrouped for attention.
        bias: What they see.
        extend: Finds the keys and values that they attend to.
        sizes: int64 ``[parts]``: how many keys each of these parts has; None if there is but one.
    """

    model: Model
    rotation: Rotation
    layout: TokenLayout
    bias: AttentionBias
    extend: Extend
    sizes: ir.Value | None


def after(*parts: Sequence[KeyValue]) -> Extend:
    """Attention to the parts of each layer first, and then to the tokens' own keys and values."""
    return lambda layer, own: [*(part[layer] for part in parts), own]
