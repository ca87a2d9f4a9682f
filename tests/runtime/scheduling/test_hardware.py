"""Schedulers that know what steps cost: what they decide, and where their budget comes from."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark.runtime import SamplingParams
from dspark.runtime.costs.model import CostModel
from dspark.runtime.costs.table import CostTable
from dspark.runtime.decoding.rounds import Round
from dspark.runtime.scheduling.hardware import AsyncHardwareScheduler, HardwareScheduler
from dspark.runtime.scheduling.options import SchedulerName
from dspark.runtime.scheduling.rates import AcceptanceRates
from dspark.runtime.scheduling.scheduler import Batch
from tests.support.costs import cost_table
from tests.support.golden_models import PROMPTS, load_with_costs

GoldenBundle = Callable[[str], Path]
HARDWARE: tuple[SchedulerName, ...] = ("hardware", "hardware-async")


def batch(requests: int, limit: int = 5, *, greedy: bool = True) -> Batch:
    return Batch(np.full(requests, limit), np.full(requests, greedy), 128)


def confident(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


# --- decisions ---


def scheduler(table: CostTable, rates: AcceptanceRates | None = None) -> HardwareScheduler:
    return HardwareScheduler(CostModel(table), rates)


def test_more_requests_leave_each_a_smaller_budget() -> None:
    """Where a step's time is that of its tokens, verification has to pay for itself."""
    table = cost_table(lambda requests, tokens, context: 10 + max(0, tokens - 8), max_requests=32)
    row = np.cumprod(np.full(5, 0.9), dtype=np.float32)
    shares = [
        scheduler(table).schedule(np.tile(row, (requests, 1)), batch(requests)).mean() for requests in (1, 2, 4, 16, 32)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 5
    assert shares[-1] <= 1


def test_predictable_text_gets_a_longer_draft() -> None:
    lengths = scheduler(cost_table()).schedule(
        np.array([[0.95, 0.95, 0.95, 0.9, 0.9], [0.5, 0.4, 0.4, 0.4, 0.4]], np.float32), batch(2)
    )
    assert lengths[0] > lengths[1]


def test_a_pause_for_many_requests_is_none_for_one() -> None:
    costly = scheduler(cost_table(draft=lambda requests, _: 10.0 * requests))
    for _ in range(10):
        if costly.drafts(batch(16)):
            costly.schedule(np.zeros((16, 5), np.float32), batch(16))
            costly.observe([Round(0, 0, False, None)] * 16, 0.2)
    assert not costly.drafts(batch(16))
    assert costly.drafts(batch(1))


def test_what_few_requests_showed_is_known_for_more() -> None:
    costly = scheduler(cost_table(draft=lambda requests, _: 10.0 * requests))
    for _ in range(40):
        if costly.drafts(batch(4)):
            costly.schedule(np.zeros((4, 5), np.float32), batch(4))
            costly.observe([Round(0, 0, False, None)] * 4, 0.2)
    assert not costly.drafts(batch(16))
    assert costly.drafts(batch(2))


def test_limits_are_kept() -> None:
    free = cost_table(lambda *_: 1.0)
    found = scheduler(free).schedule(np.ones((3, 5), np.float32), Batch(np.array([0, 2, 5]), np.ones(3, bool), 128))
    assert found.tolist() == [0, 2, 5]


@pytest.mark.parametrize("name", ["hardware", "hardware-async"])
def test_what_is_not_useful_is_not_verified(name: str) -> None:
    made = {"hardware": HardwareScheduler, "hardware-async": AsyncHardwareScheduler}[name]
    decides = made(CostModel(cost_table(lambda *_: 1.0)), None)
    ending = Batch(np.full(4, 5), np.ones(4, bool), 128, useful=np.array([1, 3, 5, 99]))
    assert not decides.drafts(replace(ending, useful=np.zeros(4, np.int64)))
    assert decides.drafts(ending)
    for _ in range(4):
        assert decides.schedule(np.full((4, 5), 0.999, np.float32), ending).tolist() == [1, 3, 5, 5]


def test_without_a_head_the_rates_of_earlier_rounds_decide() -> None:
    steep = cost_table(lambda requests, tokens, context: 10 + 3 * tokens)
    rates = AcceptanceRates(5)
    decided = scheduler(steep, rates)
    lengths = []
    for accepted in [5] * 40 + [0] * 150:
        lengths.append(int(decided.schedule(None, batch(1))[0]))
        decided.observe([Round(lengths[-1], min(accepted, lengths[-1]), False, None)], 0.01)
    assert lengths[39] == 5
    assert lengths[-1] == 1  # something must be verified, or nothing would be learnt


def test_a_budget_comes_from_two_rounds_ago() -> None:
    free, sure, unsure = cost_table(lambda *_: 1.0), confident(1, 1, 1, 1, 1), confident(0, 0, 0, 0, 0)
    decided = AsyncHardwareScheduler(CostModel(free), None)
    rounds = [sure, sure, unsure, sure, sure, sure]
    lengths = [int(decided.schedule(row, batch(1, greedy=False))[0]) for row in rounds]
    assert lengths == [5, 5, 5, 5, 0, 5]  # the first two are planned at once


def test_a_budget_is_spent_in_order_of_survival() -> None:
    decided = AsyncHardwareScheduler(CostModel(cost_table(lambda *_: 1.0)), None)
    for _ in range(2):
        decided.schedule(np.array([[1, 1, 1, 0, 0]] * 2, np.float32), batch(2, greedy=False))
    now = np.array([[0.9, 0.9, 0.9, 0.9, 0.1], [0.8, 0.6, 0.6, 0.6, 0.6]], np.float32)
    assert decided.schedule(now, batch(2, greedy=False)).tolist() == [4, 2]


def test_a_budget_follows_the_number_of_requests() -> None:
    decided = AsyncHardwareScheduler(CostModel(cost_table(lambda *_: 1.0)), None)
    for _ in range(2):
        decided.schedule(np.array([[1, 1, 0, 0, 0]] * 4, np.float32), batch(4, greedy=False))
    assert decided.schedule(confident(1, 1, 1, 1, 1), batch(1, greedy=False)).tolist() == [2]


# --- in the engine ---


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.parametrize("drafter", ["dspark_vanilla", "dflash", "eagle3"])
def test_drafts_that_cost_too_much_are_rare(name: SchedulerName, drafter: str, golden_bundle: GoldenBundle) -> None:
    costs = cost_table(draft=lambda *_: 1000.0)
    model = load_with_costs(golden_bundle(drafter), name, costs)
    request = model.request(PROMPTS[0], SamplingParams(max_new_tokens=200))
    model.run([request])
    assert 1 <= len(request.rounds) <= 12
    assert request.stats.rounds > 150
    plain = load_with_costs(golden_bundle(drafter), "off", costs).generate(
        [PROMPTS[0]], SamplingParams(max_new_tokens=200)
    )
    assert request.output_ids == plain[0].token_ids


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.parametrize("drafter", ["dspark_vanilla", "dflash", "eagle3"])
def test_greedy_texts_do_not_depend_on_the_plan(name: SchedulerName, drafter: str, golden_bundle: GoldenBundle) -> None:
    costs = cost_table(lambda requests, tokens, context: 5 + tokens)
    params = SamplingParams(max_new_tokens=48)
    expected = load_with_costs(golden_bundle(drafter), "off", costs).generate(PROMPTS, params)
    found = load_with_costs(golden_bundle(drafter), name, costs, 3).generate(PROMPTS, params)
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    assert len({length for done in found for length in done.stats.draft_lengths}) > 2
