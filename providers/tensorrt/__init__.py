"""Engines of TensorRT and TensorRT for RTX: built ahead of time, and run without ONNX Runtime."""
