"""Draws texts; with such a scheduler a seed repeats them.

Usage: sampling.py BUNDLE PROMPT
"""

import sys

from dspark.runtime import DSparkInference, SamplingParams, SpeculationOptions

bundle, prompt = sys.argv[1:]
params = [SamplingParams(max_new_tokens=32, temperature=0.8, top_p=0.95, seed=seed) for seed in (1, 2, 1)]
with DSparkInference.load(bundle, options=SpeculationOptions("fixed")) as model:
    first, second, again = (done.text for done in model.generate([prompt] * len(params), params))
print(f"seed 1: {first}\nseed 2: {second}\nseed 1: {again}")
assert first == again
