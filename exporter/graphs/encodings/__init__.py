"""How weights are stored in a graph and multiplied with, a precision a file."""

from dspark.exporter.graphs.encodings.blocks import Blocks
from dspark.exporter.graphs.encodings.encoding import Encoding
from dspark.exporter.graphs.encodings.encodings import Encodings
from dspark.exporter.graphs.encodings.float32 import Float32
from dspark.exporter.graphs.encodings.half import BFloat16, Float16
from dspark.exporter.graphs.encodings.int8 import Int8, Int8Weights

__all__ = ["BFloat16", "Blocks", "Encoding", "Encodings", "Float16", "Float32", "Int8", "Int8Weights"]
