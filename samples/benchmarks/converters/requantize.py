"""Writes a GGUF file in another type with llama.cpp.

Usage: requantize.py TYPE INPUT.gguf OUTPUT.gguf, where TYPE is F32, F16, Q8_0 or Q4_0.
"""

import sys
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]

TYPES = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def main(kind: str, source: Path, output: Path) -> None:
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = TYPES[kind]
    options.allow_requantize = True  # the model is distributed in Q4_1 only
    if llama_cpp.llama_model_quantize(bytes(source), bytes(output), options) != 0:
        sys.exit(f"error: llama.cpp cannot write {source} as {kind}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
