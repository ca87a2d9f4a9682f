"""Several threads share one model and its steps.

Usage: threads.py BUNDLE
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from dspark.runtime import DSparkInference, SamplingParams

params = SamplingParams(max_new_tokens=32)
with DSparkInference.load(sys.argv[1], profile="flash") as model, ThreadPoolExecutor() as pool:

    def answer(prompt: str) -> str:
        """Follows a stream to its end."""
        return "".join(chunk.text for chunk in model.stream(prompt, params))

    for text in pool.map(answer, [f"Tell me about the number {number}." for number in range(8)]):
        print(text)
