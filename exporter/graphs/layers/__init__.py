"""The layers of which target and drafter graphs are made.

Tokens are flat (``[N, H]``) in everything but attention, which is regrouped per request (``[B, heads, T, D]``). Only
standard operators are used, and attention is fully decomposed: that is what every execution provider places.
"""

from dspark.exporter.graphs.layers.attention import attention
from dspark.exporter.graphs.layers.attention_bias import AttentionBias, distances
from dspark.exporter.graphs.layers.decoder_layer import decoder_layer
from dspark.exporter.graphs.layers.feed_forward import feed_forward
from dspark.exporter.graphs.layers.forward_pass import Extend, ForwardPass, after
from dspark.exporter.graphs.layers.heads import heads
from dspark.exporter.graphs.layers.key_values import KeyValue, cached_rows, part_sizes
from dspark.exporter.graphs.layers.linear import embed, linear
from dspark.exporter.graphs.layers.model import Model
from dspark.exporter.graphs.layers.norm import rms_norm
from dspark.exporter.graphs.layers.rotary import Rotation, rotation
from dspark.exporter.graphs.layers.token_layout import BlockTokens, RaggedTokens, TokenLayout

__all__ = [
    "AttentionBias",
    "BlockTokens",
    "Extend",
    "ForwardPass",
    "KeyValue",
    "Model",
    "RaggedTokens",
    "Rotation",
    "TokenLayout",
    "after",
    "attention",
    "cached_rows",
    "decoder_layer",
    "distances",
    "embed",
    "feed_forward",
    "heads",
    "linear",
    "part_sizes",
    "rms_norm",
    "rotation",
]
