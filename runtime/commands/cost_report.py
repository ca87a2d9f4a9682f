"""A profile for people: a table with the outliers, and a picture of the curves."""

from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from dspark.runtime.costs.measure import Profile, outliers
from dspark.runtime.reports.pictures import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_profile", "show_profile"]


def show_profile(profile: Profile, console: Console) -> None:
    """Prints medians, ranges and outliers in milliseconds."""
    columns = ("requests", "context", "tokens", "median ms", "least", "most", "steps/s", "outliers")
    table = Table(title="Steps", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    shapes = sorted(profile.steps)
    for index, shape in enumerate(shapes):
        times, tokens = profile.steps[shape], shape.requests * shape.tokens
        table.add_row(
            *(str(shape.requests), str(shape.context_length), str(tokens), *_times(times)),
            *(f"{1 / median(times):.1f}", _outliers(times)),
            end_section=index + 1 == len(shapes) or shapes[index + 1].requests != shape.requests,
        )
    console.print(table)
    table = Table(title="Drafts", title_justify="left")
    for column in ("requests", "context", "median ms", "least", "most", "outliers"):
        table.add_column(column, justify="right")
    for (context, requests), times in sorted(profile.drafts.items()):
        table.add_row(str(requests), str(context), *_times(times), _outliers(times))
    console.print(table)


def _times(times: list[float]) -> list[str]:
    return [f"{1e3 * time:.2f}" for time in (median(times), min(times), max(times))]


def _outliers(times: list[float]) -> str:
    return ", ".join(f"{1e3 * time:.2f}" for time in sorted(outliers(times))) or "–"


def draw_profile(profile: Profile) -> bytes:
    """The curves as PNG: step time against tokens, and drafting time against requests; crosses are outliers."""
    return picture((10, 4.2), partial(_draw_curves, profile))


def _draw_curves(profile: Profile, figure: "Figure") -> None:
    steps: Axes
    drafts: Axes
    steps, drafts = figure.subplots(1, 2, width_ratios=(3, 1))
    curves: dict[tuple[int, int], dict[int, list[float]]] = {}
    for shape, times in sorted(profile.steps.items()):
        curves.setdefault((shape.requests, shape.context_length), {})[shape.requests * shape.tokens] = times
    for (requests, context), points in curves.items():
        _draw(steps, points, f"{requests} request{'s' if requests > 1 else ''}, {context} cached tokens")
    draft_curves: dict[int, dict[int, list[float]]] = {}
    for (context, requests), times in sorted(profile.drafts.items()):
        draft_curves.setdefault(context, {})[requests] = times
    for context, points in draft_curves.items():
        _draw(drafts, points, f"{context} cached tokens")
    steps.set(xlabel="tokens verified by a step", ylabel="milliseconds")
    steps.set_xscale("log", base=2)
    steps.xaxis.set_major_formatter("{x:.0f}")
    drafts.set(xlabel="requests drafted for", ylabel="milliseconds")
    for axes in (steps, drafts):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")


def _draw(axes: "Axes", points: dict[int, list[float]], label: str) -> None:
    (line,) = axes.plot(list(points), [1e3 * median(times) for times in points.values()], marker=".", label=label)
    far = [(place, 1e3 * time) for place, times in points.items() for time in outliers(times)]
    axes.plot([place for place, _ in far], [time for _, time in far], "x", color=line.get_color())
