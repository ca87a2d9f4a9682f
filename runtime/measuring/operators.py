"""Which operators of each graph the time goes to."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dspark.providers import ON_CPU, LoadOptions, NodeTime, ProfiledSession, Provider, Selection
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.calibration import read_calibration
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.errors import RequestError
from dspark.runtime.inference import DSparkInference, longest_text
from dspark.runtime.loading.costs import find_costs
from dspark.runtime.loading.serving_profile import find_profile
from dspark.runtime.loading.sessions import load_graphs, open_sessions
from dspark.runtime.reports.lines import notices
from dspark.runtime.rows import parse_row
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["GraphProfile", "OperatorShare", "profile_graphs"]

SHOWN = 10
NUMBER = re.compile(r"(?<=[._])\d+(?=/|$)")
"""A layer, a step, or the place of a node: what equal parts of a graph differ by."""


@dataclass(frozen=True)
class OperatorShare:
    """All nodes that do the same in different layers.

    Attributes:
        name: Their name without numbers.
        operator: What they compute.
        seconds: Their time in all runs together.
        runs: How often one of them ran.
        share: Their part of all nodes' time.
    """

    name: str
    operator: str
    seconds: float
    runs: int
    share: float


@dataclass(frozen=True)
class GraphProfile:
    """The most expensive operators of each graph, the most expensive first."""

    graphs: Mapping[str, Sequence[OperatorShare]]

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        return {graph: [vars(operator) for operator in operators] for graph, operators in self.graphs.items()}

    def show(self, console: Console) -> None:
        """Prints a table a graph."""
        for graph, operators in self.graphs.items():
            table = Table("Operator", "Nodes", title=f"Most expensive operators of the {graph} graph")
            table.title_justify = "left"
            for name in ("µs a run", "runs", "share"):
                table.add_column(name, justify="right")
            for each in operators:
                cost = 1e6 * each.seconds / each.runs
                table.add_row(each.operator, each.name, f"{cost:.1f}", f"{each.runs:,}", f"{each.share:.1%}")
            console.print(table)


def profile_graphs(
    path: Path,
    rows: Sequence[Mapping[str, Any] | RequestError],
    options: SpeculationOptions,
    max_new_tokens: int,
    threads: int | None,
    console: Console,
    selection: Selection = ON_CPU,
    profile: str | None = None,
) -> GraphProfile:
    """Generates greedily, batch 1, with every node's time written down.

    Args:
        path: The bundle.
        rows: Prompts, as ``dspark-run generate`` takes them.
        options: How to speculate.
        max_new_tokens: Tokens generated a prompt.
        threads: Host threads.
        console: Shows the progress.
        selection: What runs the graphs.
        profile: A serving profile, by name or file.

    Raises:
        RequestError: There is nothing to generate, or a row or the profile is refused.
    """
    if not rows or max_new_tokens < 2:
        raise RequestError(
            f"a profile of graphs needs prompts and max_new_tokens of at least 2; "
            f"there are {len(rows)} prompts and {max_new_tokens}"
        )
    bundle = Bundle.open(path, check_hashes=False)
    manifest = bundle.manifest
    serving = find_profile(profile)
    options = serving.options(manifest, options)
    plan = options.resolve(manifest)
    names = ["target"] if plan is None else list(manifest.precision)
    calibration = read_calibration(bundle)
    # Steps are measured without a profiler, which would slow them down.
    unprofiled = partial(open_sessions, bundle, selection, names, threads, check_hashes=None)
    costs = find_costs(plan, bundle, selection, threads, 1, unprofiled, notices(console))

    def load(provider: Provider, name: str, how: LoadOptions) -> ProfiledSession:
        return provider.profile(bundle.graph(name), how)

    sessions = load_graphs(bundle, selection, load, names, threads, check_hashes=None)
    limit = serving.context_length(longest_text(manifest, sessions))
    inference = DSparkInference(bundle, sessions, options, 1, limit, calibration, costs, serving.settings)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for row in progress.track(rows, description="Profiling"):
            if isinstance(row, RequestError):
                raise row
            inference.run([parse_row(inference, row, params, raw=False)])
    return GraphProfile({name: most_expensive(session.node_times()) for name, session in sessions.items()})


def most_expensive(nodes: Sequence[NodeTime]) -> list[OperatorShare]:
    """Adds up nodes of the same kind and returns the ones that took most time."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    runs: defaultdict[tuple[str, str], int] = defaultdict(int)
    for node in nodes:
        key = NUMBER.sub("*", node.name), node.operator
        seconds[key] += node.seconds
        runs[key] += 1
    total = sum(seconds.values())
    first = sorted(seconds, key=lambda key: -seconds[key])[:SHOWN]
    return [OperatorShare(*key, seconds[key], runs[key], seconds[key] / total) for key in first]
