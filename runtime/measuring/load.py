"""The engine under load: every scheduler at every concurrency, in one interleaved run.

Each of C users sends a prompt, waits for the whole answer, and sends the next one. Every scheduler has an engine of its
own, and only that engine's steps count as its time. The one that is behind goes next, so a moment in which the machine
is slow is slow for all of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, pairwise, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dspark.providers import Selection
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.calibration import read_calibration
from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.engine import Engine
from dspark.runtime.engine.request import Request
from dspark.runtime.errors import RequestError
from dspark.runtime.inference import DSparkInference, check_batch_size, longest_text
from dspark.runtime.loading.costs import find_costs
from dspark.runtime.loading.serving_profile import find_profile
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.reports.lines import notices
from dspark.runtime.rows import parse_row
from dspark.runtime.scheduling.options import SchedulerName, SpeculationOptions

__all__ = ["CONCURRENCIES", "LoadCell", "LoadReport", "LoadSettings", "Percentiles", "run_load_benchmark"]

CONCURRENCIES = (1, 2, 4, 8, 16, 32)
Row = Mapping[str, Any]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class LoadSettings(_Model):
    """What a load benchmark runs.

    Attributes:
        schedulers: Names, ``fixed:3`` for a length and ``threshold:0.5`` for a threshold; None: all that the bundle
            allows.
        concurrencies: Numbers of users.
        max_new_tokens: Tokens generated a prompt at most.
        requests_per_user: Requests that every user sends in a turn.
        repeats: Times that every concurrency is measured, each with the next prompts of the file.
        threads: Host threads; None: one a core.
        profile: A serving profile, by name or file.
        providers: What runs the graphs, as after ``--provider``.
        allow_fallback: Whether nodes that a device cannot run may run on the host.
    """

    schedulers: tuple[str, ...] | None = None
    concurrencies: tuple[int, ...] = CONCURRENCIES
    max_new_tokens: int = 96
    requests_per_user: int = 2
    repeats: int = 1
    threads: int | None = None
    profile: str | None = None
    providers: tuple[str, ...] = ("cpu",)
    allow_fallback: bool = False


class Percentiles(_Model):
    """Seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles | None":
        """The percentiles of some times; None if there are none."""
        if not seconds:
            return None
        p50, p99 = np.percentile(seconds, (50, 99))
        return cls(p50=float(p50), p99=float(p99))


class LoadCell(_Model):
    """One scheduler at one concurrency; None is what could not be observed, as all answers were too short.

    Attributes:
        scheduler: As in the settings.
        concurrency: Users.
        requests: Requests that ended.
        tokens_per_second: Of all users together, while all of them had a request under way, prompts included.
        tokens_per_second_per_user: Of the median request, from its first token on.
        time_to_first_token: From when a request was made.
        time_between_tokens: A token's wait after the one before it; the tokens of one round share its time evenly.
        verified_tokens: Draft tokens verified, a request and round; 0 if all decode plainly.
        acceptance_length: Tokens emitted, a request and round.
    """

    scheduler: str
    concurrency: int
    requests: int
    tokens_per_second: float
    tokens_per_second_per_user: float | None
    time_to_first_token: Percentiles | None
    time_between_tokens: Percentiles | None
    verified_tokens: float | None
    acceptance_length: float | None


class LoadReport(_Model):
    """What a load benchmark found.

    Attributes:
        bundle: Name of its folder.
        target: Name of the target model.
        precision: Precision of each graph.
        prompts: Prompts in the file; they are sent in turn.
        settings: What was run.
        cells: By concurrency, then by scheduler.
    """

    bundle: str
    target: str
    precision: dict[str, str]
    prompts: int
    settings: LoadSettings
    cells: list[LoadCell]


@dataclass
class _Load:
    """Measurements of one scheduler at one concurrency.

    Attributes:
        tokens: Emitted while all users had a request under way.
        seconds: How long they had.
        ended: Requests that ended.
        firsts: Seconds from when each request was made to its first token.
        speeds: Tokens a second of each request, from its first token on.
        gaps: Seconds before each token but the first.
    """

    tokens: int = 0
    seconds: float = 0.0
    ended: list[Request] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def cell(self, scheduler: str, concurrency: int) -> LoadCell:
        stats = [request.stats for request in self.ended]
        rounds = sum(each.rounds for each in stats)
        return LoadCell(
            scheduler=scheduler,
            concurrency=concurrency,
            requests=len(self.ended),
            tokens_per_second=self.tokens / self.seconds,
            tokens_per_second_per_user=median(self.speeds) if self.speeds else None,
            time_to_first_token=Percentiles.of(self.firsts),
            time_between_tokens=Percentiles.of(self.gaps),
            verified_tokens=sum(sum(each.draft_lengths) for each in stats) / rounds if rounds else None,
            acceptance_length=1 + sum(sum(each.accepted_lengths) for each in stats) / rounds if rounds else None,
        )

    def end(self, request: Request, seen: Sequence[tuple[float, int]]) -> None:
        """Takes in a request that ended, and when it had how many tokens: none when it was made, and so on."""
        self.ended.append(request)
        (made, _), (first, one), *_ = seen
        self.firsts.append(first - made)
        for (before, fewer), (now, tokens) in pairwise(seen[1:]):
            if tokens > fewer:
                self.gaps += [(now - before) / (tokens - fewer)] * (tokens - fewer)
        last, tokens = seen[-1]
        if last > first:
            self.speeds.append((tokens - one) / (last - first))


def run_load_benchmark(
    path: Path,
    rows: Sequence[Row | RequestError],
    options: SpeculationOptions,
    settings: LoadSettings,
    console: Console,
) -> LoadReport:
    """Measures every scheduler at every concurrency.

    Args:
        path: The bundle.
        rows: Prompts, as ``dspark-run generate`` takes them.
        options: The threshold and the most draft tokens, for schedulers that do not say their own.
        settings: What to run.
        console: Shows the progress.

    Raises:
        BundleError: The bundle or its calibration is damaged.
        NumericalError: The model returned values that are not finite.
        RequestError: A row, a scheduler or another setting is refused.
    """
    prompts = _checked(rows, settings)
    bundle = Bundle.open(path, check_hashes=False)
    manifest = bundle.manifest
    profile = find_profile(settings.profile)
    schedulers = {
        name: profile.options(manifest, each)
        for name, each in _schedulers(manifest, options, settings.schedulers).items()
    }
    batch_size = profile.batch_size or max(settings.concurrencies)
    plans = {name: each.resolve(manifest) for name, each in schedulers.items()}
    names = list(manifest.precision) if any(plans.values()) else ["target"]
    params = SamplingParams.parse(SamplingParams(), {"max_new_tokens": settings.max_new_tokens})
    with console.status(Text(f"Loading {path}")):
        selection = Selection.parse(settings.providers, allow_fallback=settings.allow_fallback)
        sessions = open_sessions(bundle, selection, names, settings.threads, None)
        calibration, limit = read_calibration(bundle), profile.context_length(longest_text(manifest, sessions))
        asking = next((plan for plan in plans.values() if plan is not None and plan.needs_costs), None)
        costs = find_costs(
            asking, bundle, selection, settings.threads, batch_size, lambda: sessions, notices(console)
        )  # one measurement for all schedulers
        ways = {
            name: DSparkInference(bundle, sessions, each, batch_size, limit, calibration, costs, profile.settings.alone)
            for name, each in schedulers.items()
        }
        for inference in ways.values():
            _warm_up(inference, prompts, params)
    loads: defaultdict[tuple[int, str], _Load] = defaultdict(_Load)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(
            "Measuring", total=settings.repeats * len(ways) * settings.requests_per_user * sum(settings.concurrencies)
        )
        for repeat, users in product(range(settings.repeats), settings.concurrencies):
            progress.update(task, description=f"Measuring {users} users")
            count = users * settings.requests_per_user
            taken = list(islice(cycle(prompts), repeat * count, (repeat + 1) * count))
            turns = [
                _Turn(inference.engine, _requests(inference, taken, params), users, loads[users, name])
                for name, inference in ways.items()
            ]
            for ended in _side_by_side(turns):
                progress.advance(task, ended)
    return LoadReport(
        bundle=path.resolve().name,
        target=manifest.target.name,
        precision={name: str(info) for name, info in manifest.precision.items()},
        prompts=len(prompts),
        settings=settings,
        cells=[loads[users, name].cell(name, users) for users in settings.concurrencies for name in ways],
    )


def _checked(rows: Sequence[Row | RequestError], settings: LoadSettings) -> list[Row]:
    prompts = []
    for row in rows:
        if isinstance(row, RequestError):
            raise row
        prompts.append(row)
    if not prompts:
        raise RequestError("a benchmark needs prompts; there are none")
    if not settings.concurrencies:
        raise RequestError("a load benchmark needs at least one concurrency")
    for users in settings.concurrencies:
        check_batch_size(users, "concurrency")
    for setting, values in (("concurrency", settings.concurrencies), ("schedulers", settings.schedulers or ())):
        for value in values:
            if values.count(value) > 1:
                raise RequestError(f"{setting} has {value} twice; each is measured once")
    for name in ("requests_per_user", "repeats"):
        if getattr(settings, name) < 1:
            raise RequestError(f"{name} is {getattr(settings, name)}; it must be at least 1")
    return prompts


def _schedulers(
    manifest: Manifest, options: SpeculationOptions, names: Sequence[str] | None
) -> dict[str, SpeculationOptions]:
    """The schedulers' options by name; those named must fit the bundle, by default all that fit are taken."""
    if names is None:
        names = [name for name in get_args(SchedulerName) if _fits(name, manifest)]
    if manifest.drafter is None or set(names) == {"off"}:
        replace(options, scheduler="off").resolve(manifest)  # nothing would follow what else is given
    if options.confidence_threshold is not None and "threshold" not in names:
        raise RequestError(
            f"confidence_threshold belongs to scheduler 'threshold', which is not among {', '.join(names)}"
        )
    chosen = {name: _options(name, options) for name in names}
    for each in chosen.values():
        each.resolve(manifest)
    return chosen


def _fits(name: SchedulerName, manifest: Manifest) -> bool:
    """Whether the bundle has what a scheduler needs."""
    try:
        SpeculationOptions(name).resolve(manifest)
    except RequestError:
        return False
    return True


def _options(text: str, options: SpeculationOptions) -> SpeculationOptions:
    """The options of a scheduler such as ``off``, ``fixed:3`` or ``threshold:0.5``."""
    name, colon, value = text.partition(":")
    known: dict[str, SchedulerName] = {each: each for each in get_args(SchedulerName)}
    if name not in known:
        raise RequestError(f"scheduler is {name!r}; there are {', '.join(known)}")
    chosen = replace(
        options,
        scheduler=known[name],
        max_draft_tokens=None if name == "off" else options.max_draft_tokens,
        confidence_threshold=options.confidence_threshold if name == "threshold" else None,
    )
    if not colon:
        return chosen
    try:
        if name == "fixed":
            return replace(chosen, max_draft_tokens=int(value))
        if name == "threshold":
            return replace(chosen, confidence_threshold=float(value))
    except ValueError as error:
        raise RequestError(f"scheduler is {text!r}; after the colon there must be a number") from error
    raise RequestError(
        f"scheduler is {text!r}; only fixed and threshold take a number, as in fixed:3 and threshold:0.5"
    )


def _warm_up(inference: DSparkInference, prompts: Sequence[Row], params: SamplingParams) -> None:
    """Runs the longest text once: afterwards no graph is called the first time.

    Raises:
        RequestError: A row is refused.
    """
    inference.run([max(_requests(inference, prompts, params), key=lambda request: request.most_tokens)])


def _requests(inference: DSparkInference, rows: Sequence[Row], params: SamplingParams) -> Iterator[Request]:
    """A request for each row, made when its turn comes.

    Raises:
        RequestError: A row is refused.
    """
    return (parse_row(inference, row, params, raw=False) for row in rows)


class _Turn:
    """Keeps as many requests under way in an engine as there are users, until there are no more.

    Args:
        engine: The engine.
        supply: The requests.
        users: How many there are under way.
        load: Takes the measurements.

    Attributes:
        seconds: What its steps have taken so far: its clock, which stands still while other engines work.
    """

    def __init__(self, engine: Engine, supply: Iterator[Request], users: int, load: _Load) -> None:
        self.seconds = 0.0
        self._engine = engine
        self._supply = supply
        self._users = users
        self._load = load
        self._full = True
        self._seen: dict[Request, list[tuple[float, int]]] = {}
        """Of the requests under way: when they had how many tokens."""
        self._refill()

    @property
    def done(self) -> bool:
        """Whether all requests have ended."""
        return not self._seen

    def step(self) -> int:
        """Takes a step; returns how many requests ended."""
        start = perf_counter()
        touched = self._engine.step()
        took = perf_counter() - start
        self.seconds += took
        self._load.seconds += self._full * took
        ended = 0
        for request in touched:
            if request.failure is not None:
                raise request.failure
            seen, tokens = self._seen[request], len(request.output_ids)
            self._load.tokens += self._full * (tokens - seen[-1][1])
            seen.append((self.seconds, tokens))
            if request.finish_reason is not None:
                self._load.end(request, self._seen.pop(request))
                ended += 1
        self._refill()
        return ended

    def _refill(self) -> None:
        for request in islice(self._supply, self._users - len(self._seen)):
            self._seen[request] = [(self.seconds, 0)]
            self._engine.submit(request)
        self._full &= len(self._seen) == self._users


def _side_by_side(turns: Iterable[_Turn]) -> Iterator[int]:
    """Takes all steps of all turns, always of the one that is behind; yields how many requests ended."""
    while turns := [turn for turn in turns if not turn.done]:
        yield min(turns, key=lambda turn: turn.seconds).step()
