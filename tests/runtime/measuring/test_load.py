"""The load benchmark: its figures against what the requests say and against a clockwork."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from dspark.runtime import RequestError, SamplingParams, SpeculationOptions
from dspark.runtime.engine.request import Stats
from dspark.runtime.measuring.load import run_load_benchmark
from dspark.runtime.measuring.load_figures import CellMeasurements, LoadCell, LoadSettings, Percentiles
from dspark.runtime.measuring.load_turns import Turn, side_by_side
from dspark.runtime.scheduling.options import SchedulerName
from tests.support.golden_models import PROMPTS, load
from tests.support.load_benchmark import ROWS, measure

GoldenBundle = Callable[[str], Path]


def test_what_does_not_depend_on_time_is_what_the_requests_say(golden_bundle: GoldenBundle) -> None:
    bundle = golden_bundle("dspark_vanilla")
    schedulers, concurrencies = ("off", "fixed", "fixed:2", "threshold:0.6"), (1, 2)
    report = measure(bundle, schedulers=schedulers, concurrencies=concurrencies, requests_per_user=3)
    assert [(cell.concurrency, cell.scheduler) for cell in report.cells] == [
        (users, name) for users in concurrencies for name in schedulers
    ]
    alone = {
        "off": SpeculationOptions("off"),
        "fixed": SpeculationOptions("fixed"),
        "fixed:2": SpeculationOptions("fixed", max_draft_tokens=2),
        "threshold:0.6": SpeculationOptions("threshold", confidence_threshold=0.6),
    }
    params = SamplingParams(max_new_tokens=16)
    outcomes = {
        name: [each.stats for each in load(bundle, 1, options).generate(PROMPTS[:3], params)]
        for name, options in alone.items()
    }
    for cell in report.cells:
        assert cell.requests == 3 * cell.concurrency  # every prompt equally often
        stats = outcomes[cell.scheduler]
        rounds = sum(each.rounds for each in stats)
        assert cell.verified_tokens == pytest.approx(sum(sum(each.draft_lengths) for each in stats) / rounds)
        assert cell.acceptance_length == pytest.approx(1 + sum(sum(each.accepted_lengths) for each in stats) / rounds)
        assert cell.time_to_first_token is not None
        assert cell.time_between_tokens is not None
        assert 0 < cell.time_to_first_token.p50 <= cell.time_to_first_token.p99
        assert 0 < cell.time_between_tokens.p50 <= cell.time_between_tokens.p99
        assert cell.tokens_per_second > 0
        assert cell.tokens_per_second_per_user is not None


class Asked:
    """A request as the benchmark sees it."""

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self.finish_reason: str | None = None
        self.failure = None
        self.stats = Stats()


class Clockwork:
    """An engine whose step takes a second, or as told, and gives every request two tokens, six in all."""

    now = 0.0

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.running: list[Asked] = []
        self.most = 0

    def submit(self, request: Asked) -> None:
        self.running.append(request)
        self.most = max(self.most, len(self.running))

    def step(self) -> list[Asked]:
        Clockwork.now += self.seconds
        touched = list(self.running)
        for request in touched:
            request.output_ids += [0, 0]
            if len(request.output_ids) == 6:
                request.finish_reason = "length"
                request.stats = Stats(3, [4, 2, 0], [1, 1, 1])
                self.running.remove(request)
        return touched


def turn_of(works: Clockwork, count: int, users: int, load: CellMeasurements) -> Turn:
    engine: Any = works
    requests: Any = (Asked() for _ in range(count))
    return Turn(engine, requests, users, load)


@pytest.mark.parametrize(("users", "count"), [(1, 1), (2, 5), (3, 3), (4, 12)])
def test_figures_of_a_clockwork(users: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    works, load = Clockwork(), CellMeasurements()
    monkeypatch.setattr("dspark.runtime.measuring.load_turns.perf_counter", lambda: Clockwork.now)
    assert sum(side_by_side([turn_of(works, count, users, load)])) == count
    assert works.most == users
    assert load.seconds == 3.0 * (count // users)  # afterwards some user has nothing to do
    assert load.cell("fixed", users) == LoadCell(
        scheduler="fixed",
        concurrency=users,
        requests=count,
        tokens_per_second=2.0 * users,
        tokens_per_second_per_user=2.0,
        time_to_first_token=Percentiles(p50=1.0, p99=1.0),
        time_between_tokens=Percentiles(p50=0.5, p99=0.5),
        verified_tokens=2.0,
        acceptance_length=2.0,
    )


def test_engines_work_side_by_side_and_each_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.runtime.measuring.load_turns.perf_counter", lambda: Clockwork.now)
    slow, fast = (turn_of(Clockwork(seconds), 8, 2, CellMeasurements()) for seconds in (3.0, 1.0))
    for _ in side_by_side([slow, fast]):
        assert fast.done or abs(slow.seconds - fast.seconds) <= 3.0  # never further than a step apart
    assert (slow.seconds, fast.seconds) == (36.0, 12.0)


def test_every_scheduler_that_fits_is_measured_by_default(golden_bundle: GoldenBundle) -> None:
    def names(bundle: str) -> set[str]:
        report = measure(golden_bundle(bundle), concurrencies=(1,), requests_per_user=1, max_new_tokens=8)
        return {cell.scheduler for cell in report.cells}

    assert names("dspark_vanilla") == set(get_args(SchedulerName))
    assert names("eagle3") == {*get_args(SchedulerName)} - {"threshold"}
    assert names("qwen3_target") == {"off"}


def test_answers_of_one_token_leave_figures_out(golden_bundle: GoldenBundle) -> None:
    (cell,) = measure(golden_bundle("dspark_vanilla"), schedulers=("off",), concurrencies=(2,), max_new_tokens=1).cells
    assert (cell.acceptance_length, cell.time_between_tokens, cell.tokens_per_second_per_user) == (None, None, None)
    assert cell.tokens_per_second > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedulers": ("fast",)}, r"scheduler is 'fast'; there are .*off"),
        ({"schedulers": ("fixed:0",)}, "max_draft_tokens is 0; this drafter allows 1 to 5"),
        ({"schedulers": ("fixed:x",)}, "scheduler is 'fixed:x'; after the colon there must be a number"),
        ({"schedulers": ("threshold:2",)}, "confidence_threshold is 2.0; it is a probability"),
        ({"schedulers": ("off:1",)}, "scheduler is 'off:1'; only fixed and threshold take a number"),
        ({"concurrencies": ()}, "at least one concurrency"),
        ({"concurrencies": (0,)}, "concurrency is 0; it must be from 1 to 1024"),
        ({"concurrencies": (1, 2, 1)}, "concurrency has 1 twice"),
        ({"schedulers": ("off", "fixed:3", "fixed:3")}, "schedulers has fixed:3 twice"),
        ({"requests_per_user": 0}, "requests_per_user is 0; it must be at least 1"),
        ({"repeats": 0}, "repeats is 0; it must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"profile": "slow"}, "there is no profile 'slow'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str, golden_bundle: GoldenBundle) -> None:
    with pytest.raises(RequestError, match=message):
        measure(golden_bundle("dspark_vanilla"), **settings)


def test_a_limit_of_drafts_does_not_concern_who_decodes_plainly(golden_bundle: GoldenBundle) -> None:
    chosen = LoadSettings(schedulers=("off", "fixed"), concurrencies=(1,), max_new_tokens=16, threads=1)
    options = SpeculationOptions(max_draft_tokens=2)
    report = run_load_benchmark(golden_bundle("dspark_vanilla"), ROWS, options, chosen, Console(quiet=True))
    assert [cell.verified_tokens == 0 for cell in report.cells] == [True, False]
