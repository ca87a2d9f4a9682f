"""Generates the same text by every scheduler.

Usage: schedulers.py BUNDLE PROMPT
"""

import sys
from typing import get_args

from dspark.runtime import DSparkInference, RequestError, SamplingParams, SpeculationOptions
from dspark.runtime.scheduling.names import SchedulerName

bundle, prompt = sys.argv[1:]
for scheduler in get_args(SchedulerName):
    try:
        model = DSparkInference.load(bundle, options=SpeculationOptions(scheduler))
    except RequestError as error:  # such as a threshold where no confidence is
        print(f"{scheduler}: {error}")
        continue
    with model:
        (done,) = model.generate([prompt], SamplingParams(max_new_tokens=64))
    verified, accepted = sum(done.stats.draft_lengths), sum(done.stats.accepted_lengths)
    print(f"{scheduler}: {done.stats.rounds} rounds, {verified} draft tokens verified, {accepted} accepted")
