"""Sessions of ONNX Runtime on the host, and the provider that all of its execution providers derive from."""
