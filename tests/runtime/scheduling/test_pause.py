"""When drafting pauses, and when it comes back."""

from collections.abc import Callable

import numpy as np
import pytest

from dspark.runtime.scheduling.pause import PLAIN_EVERY, TRIALS, DraftPause


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
