"""NVIDIA GPUs: device memory, staging, CUDA graphs, and ONNX Runtime's session over them."""
