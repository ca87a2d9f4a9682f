"""Writes a GGUF file as a Hugging Face folder in fp32.

Usage: to_huggingface.py INPUT.gguf OUTPUT
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: Path, output: Path) -> None:
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    del read.config.quantization_config  # the weights are not quantised any more, but only others can be saved
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
