"""The engine under load: every scheduler at every concurrency, in one interleaved run.

Each of C users sends a prompt, waits for the whole answer, and sends the next one. A *turn* is one scheduler at one
concurrency; turns of all schedulers follow each other at every concurrency, so that noise hits all of them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, pairwise
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
from dspark.runtime.bundle import Bundle, Manifest
from dspark.runtime.calibration import read_calibration
from dspark.runtime.display import notices
from dspark.runtime.errors import RequestError
from dspark.runtime.inference import DSparkInference, check_batch_size, longest_text, open_sessions
from dspark.runtime.options import SchedulerName, SpeculationOptions
from dspark.runtime.profiling import find_costs
from dspark.runtime.request import Request
from dspark.runtime.rows import parse_row
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.serving_profile import find_profile

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
        repeats: Turns of every scheduler at every concurrency.
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
        speeds: Tokens a second of each request, from its first token on.
        gaps: Seconds before each token but the first.
    """

    tokens: int = 0
    seconds: float = 0.0
    ended: list[Request] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def cell(self, scheduler: str, concurrency: int) -> LoadCell:
        stats = [request.stats for request in self.ended]
        rounds = sum(each.rounds for each in stats)
        firsts = [each.time_to_first_token for each in stats if each.time_to_first_token is not None]
        return LoadCell(
            scheduler=scheduler,
            concurrency=concurrency,
            requests=len(self.ended),
            tokens_per_second=self.tokens / self.seconds,
            tokens_per_second_per_user=median(self.speeds) if self.speeds else None,
            time_to_first_token=Percentiles.of(firsts),
            time_between_tokens=Percentiles.of(self.gaps),
            verified_tokens=sum(sum(each.draft_lengths) for each in stats) / rounds if rounds else None,
            acceptance_length=1 + sum(sum(each.accepted_lengths) for each in stats) / rounds if rounds else None,
        )


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
        for repeat in range(settings.repeats):
            for users in settings.concurrencies:
                for name, inference in list(ways.items())[:: -1 if repeat % 2 else 1]:
                    progress.update(task, description=f"{name}, {users} users")
                    turn = islice(cycle(prompts), users * settings.requests_per_user)
                    requests = (parse_row(inference, row, params, raw=False) for row in turn)
                    for _ in _run_turn(inference, requests, users, loads[users, name]):
                        progress.advance(task)
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
    """Runs the longest text once: afterwards the cache is as large as it gets, and no graph is called the first time.

    Raises:
        RequestError: A row is refused.
    """
    requests = [parse_row(inference, row, params, raw=False) for row in prompts]
    inference.run([max(requests, key=lambda request: request.most_tokens)])


def _run_turn(inference: DSparkInference, supply: Iterator[Request], users: int, load: _Load) -> Iterator[None]:
    """Keeps as many requests under way as there are users, until there are no more; yields whenever one ends."""
    engine = inference.engine
    arrivals: dict[Request, list[tuple[float, int]]] = {}
    start, full = perf_counter(), True
    while True:
        for request in islice(supply, users - len(arrivals)):
            arrivals[request] = []
            engine.submit(request)
        if full and len(arrivals) < users:
            full = False
            load.seconds += perf_counter() - start
        if not arrivals:
            break
        touched = engine.step()
        now = perf_counter()
        for request in touched:
            if request.failure is not None:
                raise request.failure
            seen = arrivals[request][-1][1] if arrivals[request] else 0
            arrivals[request].append((now, len(request.output_ids)))
            load.tokens += full * (len(request.output_ids) - seen)
            if request.finish_reason is not None:
                _end(request, arrivals.pop(request), load)
                yield


def _end(request: Request, arrivals: Sequence[tuple[float, int]], load: _Load) -> None:
    load.ended.append(request)
    for (before, seen), (now, tokens) in pairwise(arrivals):
        if tokens > seen:
            load.gaps += [(now - before) / (tokens - seen)] * (tokens - seen)
    if len(arrivals) > 1:
        (first, one), (last, tokens) = arrivals[0], arrivals[-1]
        load.speeds.append((tokens - one) / (last - first))
