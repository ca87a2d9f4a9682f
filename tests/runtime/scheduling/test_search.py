"""The search for prefixes against brute force, and that no plan of a sampling request looks ahead."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from dspark.runtime.scheduling.hardware import AsyncHardwareScheduler, HardwareScheduler, RoundCosts
from dspark.runtime.scheduling.scheduler import Batch, Scheduler, ThresholdScheduler
from dspark.runtime.scheduling.search import Candidates, PlanSeconds, best_plan, survivals

WIDTH = 3
Plan = tuple[int, ...]


def rounds(most: int = 3) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Confidences, limits, which requests are greedy, and the time of a round by draft tokens, jagged."""
    values = st.sampled_from([0.0, 0.3, 0.5, 0.5, 0.8, 1.0]) | st.floats(0, 1, width=32)
    return st.integers(1, most).flatmap(
        lambda requests: st.tuples(
            arrays(np.float32, (requests, WIDTH), elements=values),
            arrays(np.int64, requests, elements=st.integers(0, WIDTH)),
            arrays(np.bool_, requests),
            arrays(np.float64, requests * WIDTH + 1, elements=st.floats(0.25, 2)),
        ).map(lambda case: (*case[:3], case[3][: case[1].sum() + 1]))
    )


def by_count(seconds: np.ndarray) -> PlanSeconds:
    """Costs that depend on the number of draft tokens alone."""
    return lambda verified, longest: seconds[verified]


def rate(confidence: np.ndarray, lengths: Plan, seconds: np.ndarray) -> float:
    tokens = sum(
        1 + np.cumprod(row[:length], dtype=float).sum() for row, length in zip(confidence, lengths, strict=True)
    )
    return float(tokens / seconds[sum(lengths)])


def algorithm_1(confidence: np.ndarray, limits: np.ndarray, seconds: np.ndarray) -> list[int]:
    """Algorithm 1 as the DSpark paper writes it."""
    survival = np.cumprod(confidence, axis=1, dtype=float)
    order = sorted(
        ((r, j) for r, limit in enumerate(limits) for j in range(limit)), key=lambda each: (-survival[each], *each)
    )
    tokens, lengths = float(len(limits)), [0] * len(limits)
    best, chosen = tokens / seconds[0], list(lengths)
    for count, (r, j) in enumerate(order, start=1):
        lengths[r] = j + 1
        tokens += survival[r, j]
        if tokens / seconds[count] <= best:
            break
        best, chosen = tokens / seconds[count], list(lengths)
    return chosen


@pytest.mark.parametrize("levels", [2, 5, 1 << 20])
def test_candidates_come_in_order_of_survival_and_equals_as_they_lie(levels: int) -> None:
    generator = np.random.default_rng(levels)
    survival = np.cumprod(generator.integers(0, levels, (60, 7)) / (levels - 1), axis=1)
    limits = generator.integers(0, 8, 60)
    candidates = Candidates.of(survival, limits)
    order = [(r, j) for r, limit in enumerate(limits) for j in range(limit)]
    order.sort(key=lambda each: -survival[each])  # stable
    assert list(zip(candidates.owners, candidates.positions, strict=True)) == order


@given(rounds())
def test_greedy_requests_get_the_best_of_all_plans(case: tuple[np.ndarray, ...]) -> None:
    confidence, limits, greedy, seconds = case
    batch = Batch(limits, np.ones_like(greedy), 64)
    lengths = best_plan(survivals(confidence), batch, by_count(seconds))
    plans = product(*[range(limit + 1) for limit in limits])
    best = max(rate(confidence, plan, seconds) for plan in plans)
    assert (lengths <= limits).all()
    assert rate(confidence, tuple(lengths), seconds) == pytest.approx(best, rel=1e-12)


@given(rounds(), st.floats(0, 1))
def test_that_holds_where_long_drafts_cost_more(case: tuple[np.ndarray, ...], price: float) -> None:
    confidence, limits, greedy, seconds = case
    seconds = np.maximum.accumulate(seconds)  # else verifying what nobody asked for could pay

    def cost(verified: np.ndarray, longest: np.ndarray) -> np.ndarray:
        return seconds[verified] + price * longest

    def plan_rate(lengths: Plan) -> float:
        padded = seconds + price * (1 + max(lengths))
        return rate(confidence, lengths, padded)

    lengths = best_plan(survivals(confidence), Batch(limits, np.ones_like(greedy), 64), cost)
    best = max(plan_rate(plan) for plan in product(*[range(limit + 1) for limit in limits]))
    assert plan_rate(tuple(lengths)) == pytest.approx(best, rel=1e-12)


@given(rounds())
def test_sampling_requests_get_the_plan_of_algorithm_1(case: tuple[np.ndarray, ...]) -> None:
    confidence, limits, greedy, seconds = case
    lengths = best_plan(survivals(confidence), Batch(limits, np.zeros_like(greedy), 64), by_count(seconds))
    assert lengths.tolist() == algorithm_1(confidence, limits, seconds)


@given(rounds())
def test_greedy_requests_get_the_best_that_is_left_beside_sampling_ones(case: tuple[np.ndarray, ...]) -> None:
    confidence, limits, greedy, seconds = case
    lengths = best_plan(survivals(confidence), Batch(limits, greedy, 64), by_count(seconds))
    if not greedy.all():
        expected = np.array(algorithm_1(confidence, limits, seconds))
        assert lengths[~greedy].tolist() == expected[~greedy].tolist()
    ranges = [
        range(limit + 1) if free else [length] for limit, free, length in zip(limits, greedy, lengths, strict=True)
    ]
    best = max(rate(confidence, plan, seconds) for plan in product(*ranges))
    assert rate(confidence, tuple(lengths), seconds) == pytest.approx(best, rel=1e-12)


def test_a_long_draft_must_pay_for_what_it_pads() -> None:
    """The same confidences, with and without a price on the longest request."""
    confidence = np.array([[0.95, 0.95, 0.95], [0.9, 0.1, 0.1]], np.float32)
    batch = Batch(np.full(2, 3), np.ones(2, bool), 64)
    free = best_plan(survivals(confidence), batch, lambda verified, longest: 10 + 2 * verified)
    padded = best_plan(survivals(confidence), batch, lambda verified, longest: 10 + 2 * verified + 4.0 * longest)
    assert free.tolist() == [3, 1]
    assert padded.tolist() == [1, 1]  # and not [2, 1], the best that begins with the three surest


def test_a_confidence_that_is_no_number_ends_the_draft() -> None:
    confidence = np.array([[0.9, np.nan, 1.0], [0.9, 0.9, 0.9]], np.float32)
    assert survivals(confidence)[0].tolist() == [pytest.approx(0.9), 0, 0]
    batch = Batch(np.full(2, 3), np.ones(2, bool), 64)
    assert best_plan(survivals(confidence), batch, by_count(np.linspace(1, 1.5, 7))).tolist() == [1, 3]


# --- the output's distribution, exactly ---


class Table(RoundCosts):
    """Given times of rounds; drafts are free."""

    def __init__(self, seconds: np.ndarray) -> None:
        self.seconds = seconds

    def step_seconds(
        self, requests: int, context_length: int, draft_tokens: np.ndarray, longest: np.ndarray
    ) -> np.ndarray:
        return self.seconds[draft_tokens]

    def draft_seconds(self, requests: int, context_length: int) -> float:
        return 0.0


def continued(p: np.ndarray, q: np.ndarray, draft: Plan, length: int) -> np.ndarray:
    """Law ``[2, 2]`` of a request's next two tokens, of which each has the law p, when ``draft`` was drawn from q."""
    law, alive = np.zeros((2, 2)), 1.0
    prefix: list[int] = []
    for token in draft[:length]:
        accept = min(1.0, p[token] / q[token])
        residual = np.maximum(p - q, 0)
        if accept < 1:
            place(law, prefix, p, alive * (1 - accept) * residual / residual.sum())
        alive *= accept
        prefix.append(token)
    place(law, prefix, p, alive * p)
    return law


def place(law: np.ndarray, prefix: list[int], p: np.ndarray, following: np.ndarray) -> None:
    """Adds the outputs that begin with the accepted prefix and one more token, and go on plainly."""
    if len(prefix) >= 2:
        law[prefix[0], prefix[1]] += following.sum()
    elif prefix:
        law[prefix[0]] += following
    else:
        law += following[:, None] * p


def output_law(
    scheduler: Callable[[], Scheduler], p: np.ndarray, q: np.ndarray, confidence: np.ndarray, greedy: list[bool]
) -> np.ndarray:
    """Joint law of the next two tokens of two requests, over all drafts of two tokens.

    ``confidence[r, 0, 0]`` rates the first token of request r, ``confidence[r, 1, x]`` the second after a first x.
    """
    law = np.zeros((2, 2, 2, 2))
    for drafts in product(product((0, 1), repeat=2), repeat=2):
        rows = np.array([[confidence[r, 0, 0], confidence[r, 1, drafts[r][0]]] for r in (0, 1)], np.float32)
        lengths = scheduler().schedule(rows, Batch(np.full(2, 2), np.array(greedy), 64))
        probability = np.prod([q[token] for draft in drafts for token in draft])
        first, second = (continued(p, q, draft, int(length)) for draft, length in zip(drafts, lengths, strict=True))
        law += probability * first[:, :, None, None] * second
    return law


def after_two_rounds(seconds: np.ndarray, history: np.ndarray) -> AsyncHardwareScheduler:
    scheduler = AsyncHardwareScheduler(Table(seconds), None)
    for confidence in history:
        scheduler.schedule(confidence, Batch(np.full(2, 2), np.ones(2, bool), 64))
    return scheduler


chances = st.floats(0.1, 0.9)
laws = st.tuples(
    chances,
    chances,
    arrays(np.float32, (2, 2, 2), elements=st.floats(0, 1, width=32)),
    arrays(np.float64, 5, elements=st.floats(0.5, 2)),
    arrays(np.float32, (2, 2, 2), elements=st.floats(0, 1, width=32)),
)


@settings(max_examples=60)
@given(laws)
def test_two_requests_that_sample_are_independent_and_follow_the_target(case: tuple) -> None:
    p, q = (np.array([value, 1 - value]) for value in case[:2])
    _, _, confidence, seconds, history = case
    alone = np.outer(p, p)
    for scheduler in (
        lambda: HardwareScheduler(Table(seconds), None),
        lambda: after_two_rounds(seconds, history),
        lambda: ThresholdScheduler(0.5),
    ):
        law = output_law(scheduler, p, q, confidence, [False, False])
        np.testing.assert_allclose(law, alone[:, :, None, None] * alone, atol=1e-9)


@settings(max_examples=60)
@given(laws)
def test_a_request_that_samples_beside_a_greedy_one_follows_the_target(case: tuple) -> None:
    """Whatever the greedy one's draft is: only the sampling one's law is looked at."""
    p, q = (np.array([value, 1 - value]) for value in case[:2])
    law = output_law(lambda: HardwareScheduler(Table(case[3]), None), p, q, case[2], [True, False])
    np.testing.assert_allclose(law.sum(axis=(0, 1)), np.outer(p, p), atol=1e-9)


def test_a_search_that_looks_ahead_would_be_caught() -> None:
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    confidence = np.array([[[0.8, 0.8], [0.9, 0.0]]] * 2, np.float32)
    seconds = 1 / np.array([1, 0.6, 0.55, 0.5, 0.45])
    law = output_law(lambda: HardwareScheduler(Table(seconds), None), p, q, confidence, [True, True])
    assert abs(law.sum(axis=(1, 2, 3)) - p).max() > 0.02


# --- the counterexample of the DSpark paper: two tokens, A = 0 and B = 1 ---

P = np.array([0.7, 0.3])
SECONDS = 1 / np.array([1, 0.5, 0.45])
CONFIDENCE = np.array([[0.8, 0.9], [0.8, 0.0]], np.float32)
"""After a first token A, and after B."""
ONE = Batch(np.array([2]), np.array([False]), 64)
DRAWS = 100_000


def async_scheduler() -> Scheduler:
    scheduler = AsyncHardwareScheduler(Table(SECONDS), None)
    for _ in range(2):
        scheduler.schedule(np.ones((1, 2), np.float32), ONE)
    return scheduler


def first_tokens(scheduler: Callable[[], Scheduler], batch: Batch) -> np.ndarray:
    """How often each token comes first in rounds that draft from (0.5, 0.5)."""
    lengths = np.array([scheduler().schedule(row[None], batch)[0] for row in CONFIDENCE])
    generator = np.random.default_rng(8)
    drafts = generator.integers(0, 2, DRAWS)
    plain = (generator.random(DRAWS) >= P[0]).astype(int)
    stands = generator.random(DRAWS) < np.minimum(1, P / 0.5)[drafts]
    verified = np.where(stands, drafts, 0)  # all of max(p - q, 0) is on A
    return np.bincount(np.where(lengths[drafts] > 0, verified, plain), minlength=2)


@pytest.mark.parametrize(
    "scheduler",
    [lambda: HardwareScheduler(Table(SECONDS), None), async_scheduler, lambda: ThresholdScheduler(0.85)],
    ids=["hardware", "hardware-async", "threshold"],
)
def test_the_counterexample_does_not_bend_the_distribution(scheduler: Callable[[], Scheduler]) -> None:
    assert stats.chisquare(first_tokens(scheduler, ONE), DRAWS * P).pvalue > 1e-3


def test_the_counterexample_bends_a_search_that_looks_ahead() -> None:
    greedy = Batch(np.array([2]), np.array([True]), 64)
    found = first_tokens(lambda: HardwareScheduler(Table(SECONDS), None), greedy)
    assert found[0] / DRAWS == pytest.approx(0.85, abs=0.01)
