"""Which encoding each weight of a graph gets."""

from dataclasses import dataclass

from dspark.exporter.graphs.encodings.encoding import Encoding
from dspark.exporter.graphs.encodings.float32 import Float32
from dspark.exporter.graphs.encodings.half import Float16

__all__ = ["Encodings"]


@dataclass(frozen=True)
class Encodings:
    """The encodings of one graph.

    Attributes:
        linear: Of linear layers.
        tables: Of embedding and LM head.
    """

    linear: Encoding
    tables: Encoding

    @property
    def head_tables(self) -> Encoding:
        """The encoding of the sequential head's tables: a row is looked up at every step, in as few nodes as can be."""
        return Float16() if self.tables.rounds_inputs else self.tables

    def of(self, layer: str) -> Encoding:
        """The encoding of a linear layer, by its name.

        Confidences stay float32. A drafter's ``fc`` reads the raw residual stream: rounded to whole numbers, its few
        huge values would leave nothing of the others.
        """
        name = layer.rpartition("drafter.")[2]
        if name == "lm_head":
            return self.tables
        if name == "confidence_head.proj" or (name == "fc" and self.linear.rounds_inputs):
            return Float32()
        return self.linear
