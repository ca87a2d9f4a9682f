"""NVIDIA GPUs: device memory, staging, CUDA graphs, and ONNX Runtime's sessions over them.

Imports ``onnxruntime``'s session, and ``provider`` and what is below it.
"""
