"""Plain against speculative decoding, measured in one interleaved run.

Besides both speeds it times the bare graph calls, which say what the measured acceptance length allows.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.request import Request
from dspark.runtime.errors import RequestError
from dspark.runtime.inference import DSparkInference
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.loading.serving_profile import find_profile
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.drafter import DraftInput
from dspark.runtime.model.graphs import ModelGraphs
from dspark.runtime.model.target import TokenRun
from dspark.runtime.reports.lines import notices
from dspark.runtime.rows import parse_row
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["BenchReport", "default_prompts", "run_benchmark"]

GRAPHS = ("draft", "head", "verify")
PHASES = (*GRAPHS, "schedule", "host", "total")
BARE_CALLS = 12
"""Times each bare graph call is measured after every prompt; the median of all counts."""


def default_prompts() -> bytes:
    """The prompts that come with the package, JSONL."""
    return files("dspark.configs").joinpath("bench_prompts.jsonl").read_bytes()


@dataclass
class Decoding:
    """Measurements of one way of decoding; times in milliseconds.

    Attributes:
        rounds: Each round's time by phase; ``total`` is the whole, ``host`` what is in no graph call.
        prefills: Prefill time, a request.
        tokens: Tokens emitted by the rounds.
        draft_lengths: Rounds by the number of draft tokens that they verified.
        kinds: Time of the rounds by this number and by whether they drafted.
    """

    rounds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PHASES})
    prefills: list[float] = field(default_factory=list)
    tokens: int = 0
    draft_lengths: Counter[int] = field(default_factory=Counter)
    kinds: defaultdict[tuple[int, bool], list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def acceptance_length(self) -> float:
        """Tokens a round emitted on average."""
        return self.tokens / len(self.rounds["total"])

    @property
    def per_token(self) -> float:
        """Milliseconds a token; each round counts as the median one of its kind."""
        return sum(median(times) * len(times) for times in self.kinds.values()) / self.tokens

    @property
    def drafting_share(self) -> float:
        """Part of the rounds that drafted."""
        return sum(len(times) for (_, drafted), times in self.kinds.items() if drafted) / len(self.rounds["total"])

    def phase(self, name: str) -> float:
        """Median time a round of one phase."""
        return median(self.rounds[name])

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        return {
            "tokens_per_second": 1e3 / self.per_token,
            "milliseconds_per_round": {name: self.phase(name) for name in PHASES},
            "host_share": self.phase("host") / self.phase("total"),
            "prefill_milliseconds": median(self.prefills),
            "acceptance_length": self.acceptance_length,
            "drafting_share": self.drafting_share,
            "draft_lengths": dict(sorted(self.draft_lengths.items())),
        }


@dataclass
class BareCalls:
    """Times of graph calls made one after another, with nothing between them.

    Attributes:
        plain: The target with one token and no drafter's context.
        verify: The target by the number of tokens.
        draft: Drafter and head.
    """

    plain: list[float] = field(default_factory=list)
    verify: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    draft: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class BenchReport:
    """What a benchmark found.

    Attributes:
        plain: Plain decoding.
        speculative: Speculative decoding; None for a bundle without a drafter.
        bare: Bare graph calls.
        identical: Prompts for which both ways gave the same tokens, and all prompts.
    """

    plain: Decoding
    speculative: Decoding | None
    bare: BareCalls
    identical: tuple[int, int]

    @property
    def plain_over_bare(self) -> float:
        """A plain round over the bare graph call."""
        return self.plain.phase("total") / median(self.bare.plain)

    @property
    def speedup(self) -> float | None:
        """Plain time a token over speculative time a token."""
        return None if self.speculative is None else self.plain.per_token / self.speculative.per_token

    @property
    def possible_speedup(self) -> float | None:
        """What the bare graph times and the measured acceptance length allow."""
        if self.speculative is None:
            return None
        lengths = self.speculative.draft_lengths
        verify = sum(median(self.bare.verify[1 + length]) * count for length, count in lengths.items())
        round_time = verify / lengths.total() + median(self.bare.draft) * self.speculative.drafting_share
        return median(self.bare.plain) * self.speculative.acceptance_length / round_time

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON; times in milliseconds."""
        return {
            "plain": self.plain.as_dict(),
            "speculative": None if self.speculative is None else self.speculative.as_dict(),
            "bare_milliseconds": {
                "plain": median(self.bare.plain),
                "verify": {tokens: median(times) for tokens, times in sorted(self.bare.verify.items())},
                "draft": median(self.bare.draft) if self.bare.draft else None,
            },
            "plain_over_bare": self.plain_over_bare,
            "speedup": self.speedup,
            "possible_speedup": self.possible_speedup,
            "identical_outputs": self.identical[0],
            "prompts": self.identical[1],
        }

    def show(self, console: Console) -> None:
        """Prints the figures as tables."""
        table = Table("ms a round (median)", title="Where a round's time goes", title_justify="left")
        columns = {"plain": self.plain, "speculative": self.speculative}
        present = {name: decoding for name, decoding in columns.items() if decoding is not None}
        for name in present:
            table.add_column(name, justify="right")
        for phase in PHASES:
            table.add_row(phase, *[f"{decoding.phase(phase):.2f}" for decoding in present.values()])
        table.add_row("host share", *[f"{d.phase('host') / d.phase('total'):.1%}" for d in present.values()])
        table.add_section()
        table.add_row("prefill, a request", *[f"{median(d.prefills):.1f}" for d in present.values()])
        table.add_row("rounds that draft", *[f"{d.drafting_share:.0%}" for d in present.values()])
        table.add_row("acceptance length", *[f"{d.acceptance_length:.2f}" for d in present.values()])
        table.add_row("tokens a second", *[f"{1e3 / d.per_token:.1f}" for d in present.values()])
        console.print(table)
        console.print(f"Plain decoding over the bare graph call: {self.plain_over_bare:.3f}")
        if self.speedup is not None and self.possible_speedup is not None:
            console.print(
                f"Speed-up: {self.speedup:.2f}; the bare graph times and the acceptance length allow "
                f"{self.possible_speedup:.2f} ({self.speedup / self.possible_speedup:.0%} reached)"
            )
            same, prompts = self.identical
            console.print(f"Outputs identical with and without speculation: {same} of {prompts}")


def run_benchmark(
    path: Path,
    rows: Sequence[Mapping[str, Any] | RequestError],
    options: SpeculationOptions,
    max_new_tokens: int,
    repeats: int,
    host: HostOptions,
    console: Console,
    profile: str | None = None,
) -> BenchReport:
    """Measures greedy decoding, batch 1.

    Args:
        path: The bundle.
        rows: Prompts, as ``dspark-run generate`` takes them.
        options: How to speculate.
        max_new_tokens: Tokens generated a prompt.
        repeats: Times every prompt is run.
        host: What runs the graphs.
        console: Shows the progress.
        profile: A serving profile, by name or file.

    Raises:
        RequestError: A row or the profile is refused.
    """
    if not rows or max_new_tokens < 2 or repeats < 1:
        raise RequestError(
            f"a benchmark needs prompts, max_new_tokens of at least 2 and repeats of at least 1; "
            f"there are {len(rows)} prompts, {max_new_tokens} and {repeats}"
        )
    use = ServingOptions(options, batch_size=1, profile=find_profile(profile))
    loaded = LoadedModel.open(Bundle.open(path, check_hashes=False), host, [use])
    ways = {"plain": DSparkInference(loaded, replace(use, speculation=SpeculationOptions("off")))}
    plan = loaded.plan(use)
    if plan.speculation is not None:
        ways["speculative"] = DSparkInference(loaded, use, loaded.costs([plan], notices(console)))
    longest = loaded.limits.context_length
    params = SamplingParams(max_new_tokens=max_new_tokens)
    measured = {name: Decoding() for name in ways}
    bare, identical = BareCalls(), 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for row in progress.track(list(rows) * repeats, description="Measuring"):
            if isinstance(row, RequestError):
                raise row
            outputs = []
            for name, inference in ways.items():
                request = parse_row(inference, row, params, raw=False)
                _measure(inference, request, measured[name])
                outputs.append(request.output_ids)
            identical += all(output == outputs[0] for output in outputs)
            context = min(len(request.prompt_ids) + max_new_tokens // 2, longest - BARE_CALLS)
            _measure_bare(loaded, context, measured.get("speculative"), bare)
    if not all(decoding.tokens for decoding in measured.values()):
        raise RequestError(
            f"max_new_tokens is {max_new_tokens}; answers end before a round is measured: give more, or other prompts"
        )
    return BenchReport(measured["plain"], measured.get("speculative"), bare, (identical, len(rows) * repeats))


def _measure(inference: DSparkInference, request: Request, decoding: Decoding) -> None:
    """Runs a request and notes every round that is not part of a prefill step."""
    engine, seconds = inference.engine, inference.clock.seconds
    engine.submit(request)
    before_prefill = seconds["prefill"]
    while not engine.idle:
        before, emitted = dict(seconds), len(request.output_ids)
        start = perf_counter()
        engine.step()
        total = perf_counter() - start
        spent = {name: seconds[name] - before.get(name, 0.0) for name in ("prefill", *GRAPHS, "schedule")}
        if spent["prefill"]:
            continue
        spent |= {"host": total - sum(spent[name] for name in GRAPHS), "total": total}
        for name in PHASES:
            decoding.rounds[name].append(1e3 * spent[name])
        decoding.tokens += len(request.output_ids) - emitted
        length = request.stats.draft_lengths[-1]
        decoding.draft_lengths[length] += 1
        decoding.kinds[length, spent["draft"] > 0].append(1e3 * total)
    decoding.prefills.append(1e3 * (seconds["prefill"] - before_prefill))


def _measure_bare(loaded: LoadedModel, context: int, speculative: Decoding | None, bare: BareCalls) -> None:
    """Times graph calls back to back over a cache of ``context`` tokens."""
    clock = PhaseClock()
    graphs = ModelGraphs.of(loaded.bundle, loaded.sessions, 1, clock)
    target, drafter, info = graphs.target, graphs.drafter, loaded.bundle.manifest.drafter
    graphs.cache.reserve(context + BARE_CALLS)
    graphs.cache.lengths[:] = context

    def elapsed(*phases: str) -> float:
        return 1e3 * sum(clock.seconds.pop(name, 0.0) for name in phases)

    for _ in range(BARE_CALLS):
        target.verify([TokenRun([0], context)])
        bare.plain.append(elapsed("verify"))
    if speculative is None or drafter is None or info is None:
        return
    drafter.begin(0)
    block = DraftInput(0, np.zeros(info.draft_length, np.float32), 0.0)
    for _ in range(BARE_CALLS):
        for length in {0, *speculative.draft_lengths}:
            verification = target.verify([TokenRun([0] * (1 + length), context)])
            bare.verify[1 + length].append(elapsed("verify"))
        drafter.commit(0, verification, 0, [0])
        drafter.draft([block])
        bare.draft.append(elapsed("draft", "head"))
