"""Hugging Face transformers: a model folder, in fp32."""

import argparse
from functools import partial

import torch
from protocol import Answer, Generate, Output, Request, parser, serve
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class _Tokens(BaseStreamer):
    """Hands tokens over; what comes first is the prompt."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._output.write(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """The answer's end is its last token."""


def load(options: argparse.Namespace) -> Generate:
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)

    def generate(request: Request) -> Answer:
        output = Output()
        prompt = torch.tensor([request.prompt_ids])
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=request.stop_token_ids,
            pad_token_id=request.stop_token_ids[0],
            prompt_lookup_num_tokens=options.prompt_lookup,
            streamer=_Tokens(output),
        )
        return output.answer()

    return generate


if __name__ == "__main__":
    arguments = parser("Serves a model folder.")
    arguments.add_argument("--prompt-lookup", type=int, help="draft so many tokens by looking them up in the text")
    serve(partial(load, arguments.parse_args()), ["transformers", "torch"])
