"""A model inside a graph."""

from collections.abc import Mapping
from dataclasses import dataclass

from dspark.exporter.checkpoints.description import Backbone
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.encodings import Encodings

__all__ = ["Model"]


@dataclass(frozen=True)
class Model:
    """What all layers of a model have in common, for all tokens that go through them.

    Attributes:
        g: The graph they are recorded in.
        backbone: Their sizes.
        tensors: Their weights, by name.
        encodings: How weights are stored and multiplied with.
    """

    g: GraphBuilder
    backbone: Backbone
    tensors: Mapping[str, LazyTensor]
    encodings: Encodings
