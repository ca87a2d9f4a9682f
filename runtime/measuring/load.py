"""The engine under load: every scheduler at every concurrency, in one interleaved run.

Each of C users sends a prompt, waits for the whole answer, and sends the next one. Every scheduler has an engine of its
own, and only that engine's steps count as its time. The one that is behind goes next, so a moment in which the machine
is slow is slow for all of them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.request import Request
from dspark.runtime.errors import RequestError
from dspark.runtime.inference import DSparkInference
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions, check_batch_size
from dspark.runtime.loading.serving_profile import find_profile
from dspark.runtime.measuring.load_figures import CellMeasurements, LoadReport, LoadSettings
from dspark.runtime.measuring.load_schedulers import named_schedulers
from dspark.runtime.measuring.load_turns import Turn, side_by_side
from dspark.runtime.reports.lines import notices
from dspark.runtime.rows import parse_row
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["run_load_benchmark"]

Row = Mapping[str, Any]


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
    uses = {
        name: ServingOptions(each, profile.batch_size or max(settings.concurrencies), profile=profile, shared=False)
        for name, each in named_schedulers(manifest, options, settings.schedulers).items()
    }
    host = HostOptions.parse(settings.providers, allow_fallback=settings.allow_fallback, threads=settings.threads)
    params = SamplingParams.parse(SamplingParams(), {"max_new_tokens": settings.max_new_tokens})
    with console.status(Text(f"Loading {path}")):
        loaded = LoadedModel.open(bundle, host, list(uses.values()))
        # One measurement for all schedulers.
        costs = loaded.costs([loaded.plan(use) for use in uses.values()], notices(console))
        ways = {name: DSparkInference(loaded, use, costs) for name, use in uses.items()}
        for inference in ways.values():
            _warm_up(inference, prompts, params)
    loads: defaultdict[tuple[int, str], CellMeasurements] = defaultdict(CellMeasurements)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(
            "Measuring", total=settings.repeats * len(ways) * settings.requests_per_user * sum(settings.concurrencies)
        )
        for repeat, users in product(range(settings.repeats), settings.concurrencies):
            progress.update(task, description=f"Measuring {users} users")
            count = users * settings.requests_per_user
            taken = list(islice(cycle(prompts), repeat * count, (repeat + 1) * count))
            turns = [
                Turn(inference.engine, _requests(inference, taken, params), users, loads[users, name])
                for name, inference in ways.items()
            ]
            for ended in side_by_side(turns):
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
