"""Engines of TensorRT and TensorRT for RTX: built ahead of time, and run without ONNX Runtime.

Imports ``cuda``, and ``provider`` and what is below it.
"""
