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

from dspark.providers import LoadOptions, NodeTime, ProfiledSession, Provider
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.calibration import read_calibration
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.errors import RequestError
from dspark.runtime.inference import DSparkInference
from dspark.runtime.loading.costs import find_costs
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.loading.serving_profile import find_profile
from dspark.runtime.loading.sessions import load_graphs, open_sessions
from dspark.runtime.model.limits import ModelLimits
from dspark.runtime.reports.lines import notices
from dspark.runtime.reports.tables import TextTable, show_tables
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
        """Prints one table per graph."""
        columns = ["operator", "nodes", "µs per run", "runs", "share"]
        for graph, operators in self.graphs.items():
            rows = []
            for each in operators:
                time = f"{1e6 * each.seconds / each.runs:.1f}"
                rows.append([each.operator, each.name, time, f"{each.runs:,}", f"{each.share:.1%}"])
            show_tables([TextTable(f"Most expensive operators of the {graph} graph", columns, rows)], console)


def profile_graphs(
    path: Path,
    rows: Sequence[Mapping[str, Any] | RequestError],
    options: SpeculationOptions,
    max_new_tokens: int,
    host: HostOptions,
    console: Console,
    profile: str | None = None,
) -> GraphProfile:
    """Generates greedily, batch 1, with every node's time written down.

    Args:
        path: The bundle.
        rows: Prompts, as ``dspark-run generate`` takes them.
        options: How to speculate.
        max_new_tokens: Tokens generated a prompt.
        host: What runs the graphs.
        console: Shows the progress.
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
    use = ServingOptions(options, batch_size=1, profile=find_profile(profile))
    plan = use.resolve(manifest, ModelLimits.of(manifest))
    names = list(manifest.precision) if plan.speculation else ["target"]
    # Steps are measured without a profiler, which would slow them down.
    unprofiled = partial(open_sessions, bundle, host, names)
    costs = find_costs(plan.speculation, bundle, host, 1, unprofiled, notices(console))

    def load(provider: Provider, name: str, how: LoadOptions) -> ProfiledSession:
        return provider.profile(bundle.graph(name), how)

    sessions = load_graphs(bundle, host, load, names)
    inference = DSparkInference(LoadedModel(bundle, sessions, read_calibration(bundle), host), use, costs)
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
