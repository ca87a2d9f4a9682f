"""Measures what steps and drafts cost: whole by ``dspark-run profile``, briefly when a bundle comes without a table.

Steps run on a cache that holds no text, since time does not depend on what tokens mean. All shapes take
turns, so that a slow moment of the machine does not fall on one of them alone.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter

import numpy as np

from dspark.providers import Session
from dspark.providers.session import limits_of
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.costs.table import CostKey, CostTable, DraftCurve, StepCurve
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.drafter import DraftInput
from dspark.runtime.model.graphs import ModelGraphs
from dspark.runtime.model.target import TokenRun

__all__ = ["Grid", "Profile", "StepShape", "brief_grid", "full_grid", "measure", "outliers"]

NEAR, FAR = 128, 1024
"""Contexts that are measured."""
BRIEF_SECONDS = 4.0
FEWEST_REPEATS = 2


@dataclass(frozen=True, order=True)
class StepShape:
    """A kind of step.

    Attributes:
        requests: R.
        context_length: Cached tokens of each request.
        tokens: Verified tokens of each request, the anchor included.
    """

    requests: int
    context_length: int
    tokens: int


@dataclass(frozen=True)
class Grid:
    """What is measured.

    Attributes:
        requests: R, rising from 1.
        tokens: Verified tokens of each request, rising from 1.
        repeats: Times that everything is measured.
        seconds: After so many seconds fewer times will do.
    """

    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    repeats: int
    seconds: float = float("inf")


def full_grid(max_requests: int, draft_length: int, repeats: int) -> Grid:
    """For ``dspark-run profile``: R doubles, every length of a draft up to 8 and some beyond."""
    doubled = [1 << power for power in range(max_requests.bit_length()) if 1 << power < max_requests]
    lengths = {*range(1, min(draft_length, 8) + 1), *range(12, draft_length, 4), draft_length + 1}
    return Grid((*doubled, max_requests), tuple(sorted(lengths)), repeats)


def brief_grid(max_requests: int, draft_length: int) -> Grid:
    """For a bundle that is loaded without a table."""
    requests = sorted({1, round(max_requests**0.5), max_requests})
    tokens = sorted({1, 2, min(3, draft_length + 1), draft_length // 2 + 1, draft_length + 1})
    return Grid(tuple(requests), tuple(tokens), 5, BRIEF_SECONDS)


@dataclass
class Profile:
    """Measured times in seconds.

    Attributes:
        steps: Of steps, by shape.
        drafts: Of drafts, by the context and the number of requests.
    """

    steps: defaultdict[StepShape, list[float]] = field(default_factory=lambda: defaultdict(list))
    drafts: defaultdict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def table(self, key: CostKey, *, brief: bool = False) -> CostTable:
        """The medians; ``brief`` says that little time was spent on them."""
        curves: defaultdict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        for shape, times in sorted(self.steps.items()):
            curves[shape.requests, shape.context_length].append((shape.requests * shape.tokens, 1 / median(times)))
        drafts: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        for (context, requests), times in sorted(self.drafts.items()):
            drafts[context].append((requests, 1 / median(times)))
        return CostTable(
            key=key,
            brief=brief,
            max_batch_tokens=max(shape.requests * shape.tokens for shape in self.steps),
            curves=tuple(
                StepCurve(
                    requests=requests,
                    context_length=context,
                    sample_batch_tokens=tuple(tokens for tokens, _ in points),
                    sample_steps_per_sec=tuple(rate for _, rate in points),
                )
                for (requests, context), points in curves.items()
            ),
            draft_curves=tuple(
                DraftCurve(
                    context_length=context,
                    sample_requests=tuple(requests for requests, _ in points),
                    sample_drafts_per_sec=tuple(rate for _, rate in points),
                )
                for context, points in drafts.items()
            ),
        )


def outliers(times: list[float]) -> list[float]:
    """Those further than 1.5 times the distance between the quartiles from the nearer quartile (Tukey)."""
    if len(times) < 2:
        return []
    low, _, high = quantiles(times, method="inclusive")
    margin = 1.5 * (high - low)
    return [time for time in times if not low - margin <= time <= high + margin]


def measure(
    bundle: Bundle, sessions: Mapping[str, Session], grid: Grid, advance: Callable[[], None] = lambda: None
) -> Profile:
    """Measures steps and drafts of all requests at a short context, and of one request at a long one too.

    Args:
        bundle: A bundle with a drafter.
        sessions: Its graphs.
        grid: What to measure.
        advance: Called after every repetition, the first one included, which only warms up.
    """
    limits = limits_of(sessions["target"])
    room = limits.cache_tokens or bundle.manifest.target.context_length
    near = _Bench(bundle, sessions, grid.requests[-1], min(NEAR, room))
    far = _Bench(bundle, sessions, 1, min(FAR, room))
    profile, start = Profile(), perf_counter()
    for repeat in range(grid.repeats + 1):
        if repeat > FEWEST_REPEATS and perf_counter() - start > grid.seconds:
            break
        measured = Profile()
        for requests in grid.requests:
            near.steps(requests, grid.tokens, measured)
            near.draft(requests, measured)
        if far.context_length > near.context_length:
            far.steps(1, grid.tokens, measured)
            far.draft(1, measured)
        if repeat:  # a shape's first call is slow
            for shape, times in measured.steps.items():
                profile.steps[shape] += times
            for place, times in measured.drafts.items():
                profile.drafts[place] += times
        advance()
    return profile


class _Bench:
    """Steps and drafts over a cache that is full.

    Args:
        bundle: A bundle with a drafter.
        sessions: Its graphs.
        slots: The most requests.
        context_length: Tokens that the cache holds of each.

    Attributes:
        context_length: The cache's capacity, which attention computes whatever it holds.
    """

    def __init__(self, bundle: Bundle, sessions: Mapping[str, Session], slots: int, context_length: int) -> None:
        manifest = bundle.manifest
        assert manifest.drafter is not None
        graphs = ModelGraphs.of(bundle, sessions, slots, PhaseClock())
        assert graphs.drafter is not None
        self._cache, self._target, self._drafter = graphs.cache, graphs.target, graphs.drafter
        self._cache.reserve(context_length)
        self.context_length = self._cache.capacity
        self._held = self.context_length - (manifest.drafter.draft_length + 1)  # so that no step makes it grow
        for group, info in enumerate(manifest.caches):
            rows = np.ones((info.layers, 2, info.kv_heads, self._held, info.head_dim), np.float32)
            for slot in range(slots):
                self._cache.append(group, slot, rows)  # memory that was never written takes no time to read
        self._begin(slots)
        self._input = DraftInput(0, np.zeros(manifest.drafter.draft_length, np.float32), 0.0)

    def steps(self, requests: int, tokens: tuple[int, ...], profile: Profile) -> None:
        """Measures a step of each length."""
        for count in tokens:
            profile.steps[StepShape(requests, self.context_length, count)].append(self._step(requests, count))

    def draft(self, requests: int, profile: Profile) -> None:
        """Measures a draft after a step, as in generation."""
        self._begin(requests)  # the drafter has only this step's tokens to take
        self.steps(requests, (1,), profile)
        start = perf_counter()
        self._drafter.draft([self._input] * requests)
        profile.drafts[self.context_length, requests].append(perf_counter() - start)

    def _begin(self, requests: int) -> None:
        for slot in range(requests):
            self._drafter.begin(slot)

    def _step(self, requests: int, count: int) -> float:
        """Time of verifying ``count`` tokens of each request, choosing the likeliest and keeping one."""
        self._cache.lengths[:] = self._held
        start = perf_counter()
        verification = self._target.verify([TokenRun([0] * count, self.context_length)] * requests)
        for index in range(count * requests):
            verification.scores.likeliest(index)
        for slot in range(requests):
            self._target.commit(slot, verification, slot, 1)
            self._drafter.commit(slot, verification, slot, [0])
        return perf_counter() - start
