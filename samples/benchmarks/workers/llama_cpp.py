"""llama.cpp through llama-cpp-python: a GGUF file."""

import argparse
from functools import partial

from llama_cpp import Llama  # type: ignore[import-not-found]
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # type: ignore[import-not-found]
from protocol import Answer, Generate, Output, Request, parser, serve


def load(options: argparse.Namespace) -> Generate:
    tokens = options.prompt_lookup
    model = Llama(
        str(options.model),
        n_ctx=options.context_length + (tokens or 0) + 1,  # drafts may reach beyond the text's end
        n_threads=options.threads,
        n_threads_batch=options.threads,
        flash_attn=True,  # llama.cpp's own choice; its bindings would switch it off
        draft_model=None if tokens is None else LlamaPromptLookupDecoding(num_pred_tokens=tokens),
        logits_all=tokens is not None,  # a draft needs the logits of all its tokens, and a buffer for them
        verbose=False,
    )

    def generate(request: Request) -> Answer:
        output = Output()
        model.reset()  # or the prompt's beginning would be taken from the prompt before
        for token in model.generate(request.prompt_ids, temp=0.0):
            output.write([token])
            if token in request.stop_token_ids or len(output.token_ids) == request.max_new_tokens:
                break
        return output.answer()

    return generate


if __name__ == "__main__":
    arguments = parser("Serves a GGUF file.")
    arguments.add_argument("--prompt-lookup", type=int, help="draft so many tokens by looking them up in the text")
    serve(partial(load, arguments.parse_args()), ["llama-cpp-python"])
