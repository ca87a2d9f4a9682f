"""Generates for several prompts at once.

Usage: generate.py BUNDLE PROMPT...
"""

import sys

from dspark.runtime import DSparkInference, SamplingParams

bundle, *prompts = sys.argv[1:]
with DSparkInference.load(bundle) as model:
    for prompt, done in zip(prompts, model.generate(prompts, SamplingParams(max_new_tokens=64)), strict=True):
        print(f"{prompt}\n{done.text}\n")
        print(f"{done.stats.tokens_per_second:.0f} tokens per second in {done.stats.rounds} rounds")
        if done.stats.acceptance_length is not None:
            print(f"{done.stats.acceptance_length:.2f} tokens per round")
