"""ONNX Runtime GenAI: a folder that its model builder wrote."""

import argparse
import json
from functools import partial

import onnxruntime_genai as og  # type: ignore[import-not-found]
from protocol import Answer, Generate, Output, Request, parser, serve


def load(options: argparse.Namespace) -> Generate:
    og.disable_telemetry_events()
    config = og.Config(str(options.model))
    session = {"intra_op_num_threads": options.threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = og.Model(config)

    def generate(request: Request) -> Answer:
        output = Output()
        search = og.GeneratorParams(model)
        search.set_search_options(do_sample=False, max_length=len(request.prompt_ids) + request.max_new_tokens)
        generator = og.Generator(model, search)
        generator.append_tokens(request.prompt_ids)
        while not generator.is_done():
            generator.generate_next_token()
            tokens = generator.get_next_tokens()
            output.write(tokens)
            if tokens[0] in request.stop_token_ids:
                break
        return output.answer()

    return generate


if __name__ == "__main__":
    serve(partial(load, parser("Serves a model folder.").parse_args()), ["onnxruntime-genai", "onnxruntime"])
