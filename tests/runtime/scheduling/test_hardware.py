"""Schedulers that know what steps cost: when they draft, what they learn, where their budget comes from."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark.providers import find_provider
from dspark.runtime import Bundle, DSparkInference, RequestError, SamplingParams, SpeculationOptions
from dspark.runtime.costs.model import CostModel
from dspark.runtime.costs.table import CostTable
from dspark.runtime.decoding.rounds import Round
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.scheduling.hardware import AsyncHardwareScheduler, HardwareScheduler
from dspark.runtime.scheduling.options import SchedulerName
from dspark.runtime.scheduling.pause import PLAIN_EVERY, TRIALS, DraftPause
from dspark.runtime.scheduling.rates import AcceptanceRates
from dspark.runtime.scheduling.scheduler import Batch
from tests.costs import cost_table
from tests.runtime.golden_models import PROMPTS, load_with_costs

GoldenBundle = Callable[[str], Path]
HARDWARE: tuple[SchedulerName, ...] = ("hardware", "hardware-async")


def batch(requests: int, limit: int = 5, *, greedy: bool = True) -> Batch:
    return Batch(np.full(requests, limit), np.full(requests, greedy), 128)


def confident(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


# --- the pause ---


def drafted(
    pause: DraftPause, tokens: Callable[[int], float], cost: float, rounds: int, requests: int = 1
) -> list[int]:
    """The rounds that draft, if one that does promises so many tokens and gives them."""
    return drafted_on_promise(
        pause, lambda index: tokens(index) - 1, lambda index: tokens(index) - 1, cost, rounds, requests
    )


def drafted_on_promise(
    pause: DraftPause,
    promised: Callable[[int], float],
    accepted: Callable[[int], float],
    cost: float,
    rounds: int,
    requests: int = 1,
) -> list[int]:
    """The rounds that draft, if one that does promises so many draft tokens, of which so many are accepted."""
    found = []
    for index in range(rounds):
        if pause.over():
            found.append(index)
            pause.record(requests, promised(index), accepted(index), cost, 1.0)
        else:
            pause.record_plain(1.0)
    return found


def test_drafting_goes_on_as_long_as_it_pays() -> None:
    """But for the rounds that tell what plain decoding takes."""
    found = drafted(DraftPause(), lambda index: 1 + 3 * (index % 2), 1.5, 1000)
    assert len(found) >= 1000 - 1000 / PLAIN_EVERY - 5
    assert len([index for index in found if index > 500]) >= 499 - 500 / PLAIN_EVERY - 1
    assert max(np.diff(found)) == 2


def test_without_a_clock_every_round_drafts_that_pays() -> None:
    assert drafted(DraftPause(timed=False), lambda _: 2.0, 1.5, 200) == [*range(200)]


def test_what_rounds_take_counts_for_more_than_what_was_expected() -> None:
    """A draft that would pay by the table, on a device where it takes twice as long."""
    pause = DraftPause()
    found = []
    for index in range(2000):
        if pause.over():
            found.append(index)
            pause.record(1, 0.6, 0.6, 1.3, 2.0)
        else:
            pause.record_plain(1.0)
    assert len([index for index in found if index > 500]) < 20


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("cost", [1.05, 1.15, 1.7])
def test_trials_of_drafting_that_loses_cost_a_bounded_part(cost: float, requests: int) -> None:
    found = drafted(DraftPause(), lambda _: 1.0, cost, 4000, requests)
    late = [index for index in found if index >= 1000]
    assert late
    assert len(late) * (cost - 1) / 3000 <= 1.1 * TRIALS


def test_many_requests_show_soon_that_drafting_loses() -> None:
    assert len(drafted(DraftPause(), lambda _: 1.1, 1.7, 100, requests=16)) <= 4


def test_drafting_comes_back_when_the_text_becomes_predictable() -> None:
    found = drafted(DraftPause(), lambda index: 1.0 if index < 300 else 4.0, 1.3, 400)
    resumed = next(index for index in found if index >= 300)
    assert resumed <= 300 + 0.3 / TRIALS + 1
    assert len({*range(resumed, 400)} - {*found}) <= 2


def test_luck_does_not_decide() -> None:
    """Drafts that promise enough are made although most of them give nothing."""
    generator = np.random.default_rng(0)
    found = drafted_on_promise(
        DraftPause(timed=False), lambda _: 0.7, lambda _: float(generator.choice([0, 0, 0, 3])), 1.5, 1000
    )
    assert len(found) > 990


@pytest.mark.parametrize("promised", [0.2, 2.0])
@pytest.mark.parametrize("accepted", [0.1, 1.5])
def test_promises_count_as_far_as_they_are_kept(promised: float, accepted: float) -> None:
    found = drafted_on_promise(DraftPause(), lambda _: promised, lambda _: accepted, 1.5, 20_000)
    late = len([index for index in found if index >= 10_000]) / 10_000
    assert late > 0.9 if accepted > 1 else late < 0.1


def test_drafts_that_promise_nothing_stay_rare() -> None:
    found = drafted_on_promise(DraftPause(), lambda _: 0.0, lambda _: 0.0, 1.5, 4000)
    assert 4000 * TRIALS / 0.5 / 2 < len(found) < 4000 * TRIALS / 0.5 * 1.2


def test_one_unlucky_round_does_not_stop_it() -> None:
    found = drafted(DraftPause(), lambda index: 1.0 if index == 30 else 2.0, 1.4, 60)
    assert len({*range(30, 60)} - {*found}) <= 1  # which tells what plain decoding takes


# --- rates ---


def outcomes(generator: np.random.Generator, rates: list[float], verified: int, count: int) -> list[Round]:
    stands = np.logical_and.accumulate(generator.random((count, verified)) < rates[:verified], axis=1).sum(axis=1)
    return [Round(verified, int(accepted), False, None) for accepted in stands]


def test_rates_approach_the_drafters() -> None:
    truth, generator = [0.9, 0.7, 0.5], np.random.default_rng(0)
    rates = AcceptanceRates(3)
    for _ in range(300):
        rates.update(outcomes(generator, truth, 3, 16))
    np.testing.assert_allclose(rates.values, truth, atol=0.06)


def test_a_position_that_is_verified_no_more_is_believed_in_again() -> None:
    generator = np.random.default_rng(0)
    rates = AcceptanceRates(2)
    for _ in range(100):
        rates.update(outcomes(generator, [0.9, 0.1], 2, 4))
    assert rates.values[1] < 0.2
    for _ in range(600):
        rates.update(outcomes(generator, [0.9, 0.1], 1, 4))
    assert rates.values[1] > 0.7


def test_what_is_behind_a_stop_token_is_no_rejection() -> None:
    rates, before = AcceptanceRates(3), AcceptanceRates(3).values
    rates.update([Round(3, 1, True, None)])
    assert rates.values[0] > before[0]
    assert rates.values[1:].tolist() == pytest.approx(before[1:].tolist())


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


def test_costs_must_be_given(golden_bundle: GoldenBundle) -> None:
    bundle = Bundle.open(golden_bundle("dspark_vanilla"))
    sessions = open_sessions(bundle, find_provider("cpu"), list(bundle.manifest.precision), 1, None)
    with pytest.raises(RequestError, match="scheduler 'hardware' needs the costs of steps"):
        DSparkInference(bundle, sessions, SpeculationOptions(), 1, 512)
