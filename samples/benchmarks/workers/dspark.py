"""This project: a bundle through ``dspark.runtime``."""

import argparse
from functools import partial

from protocol import Answer, Generate, Request, parser, serve

from dspark.runtime import DSparkInference, SamplingParams, SpeculationOptions


def load(options: argparse.Namespace) -> Generate:
    speculation = SpeculationOptions(
        options.scheduler,
        max_draft_tokens=options.max_draft_tokens,
        confidence_threshold=options.confidence_threshold,
    )
    model = DSparkInference.load(options.model, threads=options.threads, batch_size=1, options=speculation)

    def generate(request: Request) -> Answer:
        # The race takes its stop tokens from a bundle, so they are the model's own.
        (done,) = model.generate([request.prompt_ids], SamplingParams(max_new_tokens=request.max_new_tokens))
        prefill_seconds = done.stats.time_to_first_token
        if done.error is not None or prefill_seconds is None:
            raise RuntimeError(done.error)
        return Answer(done.token_ids, 1, prefill_seconds, done.stats.seconds - prefill_seconds)

    return generate


if __name__ == "__main__":
    arguments = parser("Serves a bundle.")
    arguments.add_argument("--scheduler", help="see dspark-run")
    arguments.add_argument("--max-draft-tokens", type=int)
    arguments.add_argument("--confidence-threshold", type=float)
    serve(partial(load, arguments.parse_args()), ["dspark-onnx", "onnxruntime"])
