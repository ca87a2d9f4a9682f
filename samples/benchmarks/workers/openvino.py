"""OpenVINO GenAI: a GGUF file, which it reads itself."""

import argparse
from collections.abc import Sequence
from functools import partial

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]
from protocol import Answer, Generate, Output, Request, parser, serve


class _Tokens(genai.StreamerBase):  # type: ignore[misc]
    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def write(self, token: int | Sequence[int]) -> genai.StreamingStatus:
        self._output.write([token] if isinstance(token, int) else token)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """The answer's end is its last token."""


def load(options: argparse.Namespace) -> Generate:
    properties: dict[str, object] = {"INFERENCE_NUM_THREADS": options.threads}
    if options.arithmetic is not None:
        properties["INFERENCE_PRECISION_HINT"] = options.arithmetic
    if options.prompt_lookup is not None:
        properties["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(str(options.model), "CPU", **properties)

    def generate(request: Request) -> Answer:
        output = Output()
        config = genai.GenerationConfig()
        config.max_new_tokens = request.max_new_tokens
        config.do_sample = False
        config.stop_token_ids = set(request.stop_token_ids)
        if options.prompt_lookup is not None:
            config.num_assistant_tokens = options.prompt_lookup
            config.max_ngram_size = 2
        pipeline.generate(ov.Tensor(np.array([request.prompt_ids], np.int64)), config, _Tokens(output))
        return output.answer()

    return generate


if __name__ == "__main__":
    arguments = parser("Serves a GGUF file.")
    arguments.add_argument("--arithmetic", help="f32 or bf16; by default what OpenVINO prefers on the processor")
    arguments.add_argument("--prompt-lookup", type=int, help="draft so many tokens by looking them up in the text")
    serve(partial(load, arguments.parse_args()), ["openvino-genai", "openvino"])
