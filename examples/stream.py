"""Prints text as it is decided.

Usage: stream.py BUNDLE PROMPT
"""

import sys

from dspark.runtime import DSparkInference, SamplingParams

bundle, prompt = sys.argv[1:]
with DSparkInference.load(bundle, profile="flash") as model:
    for chunk in model.stream(prompt, SamplingParams(max_new_tokens=128)):
        print(chunk.text, end="", flush=True)
print()
