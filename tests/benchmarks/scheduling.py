"""Prints how long schedulers take to decide: ``python -m tests.benchmarks.scheduling``."""

from statistics import median
from time import perf_counter

import numpy as np

from dspark.runtime.costs.model import CostModel
from dspark.runtime.scheduling.hardware import AsyncHardwareScheduler, HardwareScheduler
from dspark.runtime.scheduling.scheduler import Batch, FixedScheduler, Scheduler, ThresholdScheduler
from tests.support.costs import cost_table

REPEATS = 500


def main() -> None:
    costs = CostModel(cost_table(max_requests=256, draft_length=16))
    generator = np.random.default_rng(0)
    for requests, width in ((1, 7), (8, 7), (32, 7), (256, 16)):
        sampling = generator.random(requests) < 0.5
        for mix, greedy in (("greedy", ~sampling | True), ("sampling", sampling & False), ("mixed", ~sampling)):
            batch = Batch(np.full(requests, width), greedy, 512)
            confidences = generator.random((64, requests, width), np.float32) ** 0.3
            schedulers: dict[str, Scheduler] = {
                "hardware": HardwareScheduler(costs, None),
                "hardware-async": AsyncHardwareScheduler(costs, None),
                "threshold": ThresholdScheduler(0.6),
                "fixed": FixedScheduler(),
            }
            for name, scheduler in schedulers.items():
                times = []
                for repeat in range(REPEATS):
                    start = perf_counter()
                    scheduler.schedule(confidences[repeat % 64], batch)
                    times.append(perf_counter() - start)
                print(f"{requests:4} × {width:2} {mix:9} {name:15} {1e3 * median(times):.3f} ms")


if __name__ == "__main__":
    main()
