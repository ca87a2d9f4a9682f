"""The ONNX graphs of a bundle, built from a checkpoint's description."""

from dspark.exporter.graphs.block import build_block_drafter
from dspark.exporter.graphs.eagle3 import build_eagle3_drafter
from dspark.exporter.graphs.head import build_head
from dspark.exporter.graphs.target import build_target

__all__ = ["build_block_drafter", "build_eagle3_drafter", "build_head", "build_target"]
