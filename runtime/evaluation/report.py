"""An evaluation as a folder: ``evaluation.json``, pictures, and one page that shows all of it without a network."""

import os
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from jinja2 import Environment, StrictUndefined

from dspark.runtime.bundle.files import write_whole
from dspark.runtime.errors import RequestError
from dspark.runtime.evaluation.evaluator import Evaluation
from dspark.runtime.evaluation.figures import ReliabilityBins, Scaling
from dspark.runtime.evaluation.metrics import BINS
from dspark.runtime.evaluation.tables import evaluation_tables
from dspark.runtime.reports.pictures import can_draw, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_report", "write_report"]

Draw: TypeAlias = "Callable[[Evaluation, Figure], None]"

LINES: dict[Scaling, str] = {"raw": "--", "calibrated": "-"}
LABELS: dict[Scaling, str] = {"raw": "as the head gives it", "calibrated": "calibrated"}


def check_report(folder: Path) -> None:
    """Makes sure that a report can be written, before there is anything to write.

    Raises:
        RequestError: matplotlib is missing, or the folder is a file or cannot be written.
    """
    if not can_draw():
        raise RequestError("--report needs matplotlib: pip install 'dspark-onnx[report]'")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise RequestError(f"--report {folder}: {existing} is no folder that can be written")


def write_report(evaluation: Evaluation, folder: Path) -> None:
    """Writes ``evaluation.json``, the pictures and ``index.html``; all is rendered before anything is written.

    Args:
        evaluation: What to show.
        folder: Made if it does not exist; files of the same names are replaced.

    Raises:
        OSError: The folder cannot be written.
    """
    shown: dict[str, tuple[Draw, bool]] = {
        "acceptance": (_draw_acceptance, True),
        "reliability": (_draw_reliability, bool(evaluation.reliability)),
        "threshold": (_draw_sweep, bool(evaluation.pooled.figures.sweep)),
    }
    pictures = {name: picture((10, 4.2), partial(draw, evaluation)) for name, (draw, known) in shown.items() if known}
    page = _page(evaluation, pictures)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "evaluation.json", f"{evaluation.model_dump_json(indent=2)}\n".encode())
    for name in shown:
        if name in pictures:
            write_whole(folder / f"{name}.png", pictures[name])
        else:
            (folder / f"{name}.png").unlink(missing_ok=True)  # of an earlier evaluation
    write_whole(folder / "index.html", page.encode())


def _page(evaluation: Evaluation, pictures: dict[str, bytes]) -> str:
    template = files("dspark.runtime.evaluation").joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        evaluation=evaluation,
        tables=evaluation_tables(evaluation),
        pictures={name: b64encode(content).decode() for name, content in pictures.items()},
    )


def _draw_acceptance(evaluation: Evaluation, figure: "Figure") -> None:
    axes = figure.subplots()
    lines = {name: result.figures.acceptance.conditional for name, result in evaluation.datasets.items()}
    for name, values in lines.items():
        axes.plot(*_known(range(1, len(values) + 1), values), marker="o", linewidth=1, label=_plain(name))
    if len(lines) > 1:
        values = evaluation.macro_average.acceptance.conditional
        axes.plot(*_known(range(1, len(values) + 1), values), marker="o", color="black", label="macro average")
    axes.set_xticks(range(1, evaluation.drafter.draft_length + 1))
    axes.set(xlabel="position in the draft", ylabel="accepted, if all before were", ylim=(0, 1))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _draw_reliability(evaluation: Evaluation, figure: "Figure") -> None:
    panels: tuple[Literal["confidence", "survival"], ...] = ("confidence", "survival")
    titles = {
        "confidence": "one token's confidence, if all before were accepted",
        "survival": "survival of the draft's first tokens",
    }
    for axes, panel in zip(figure.subplots(1, 2), panels, strict=True):
        axes.plot((0, 1), (0, 1), color="grey", linewidth=1)
        for scaling, curves in evaluation.reliability.items():
            bins: ReliabilityBins = getattr(curves, panel)
            axes.plot(*_known(bins.predicted, bins.observed), LINES[scaling], marker="o", label=LABELS[scaling])
        axes.set(title=titles[panel], xlabel="predicted", ylabel="observed", xlim=(0, 1), ylim=(0, 1))
        axes.set_xticks([edge / BINS for edge in range(BINS + 1)], minor=True)
        axes.title.set_fontsize("medium")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)


def _draw_sweep(evaluation: Evaluation, figure: "Figure") -> None:
    rate: Axes
    length: Axes
    rate, length = figure.subplots(1, 2)
    for scaling, sweep in evaluation.pooled.figures.sweep.items():
        style, label = LINES[scaling], LABELS[scaling]
        rate.plot(*_known(evaluation.thresholds, sweep.acceptance_rate), style, marker=".", label=label)
        length.plot(*_known(evaluation.thresholds, sweep.acceptance_length), style, marker=".", label=label)
    rate.set(xlabel="confidence threshold", ylabel="accepted of verified tokens", xlim=(0, 1), ylim=(0, 1))
    length.set(xlabel="confidence threshold", ylabel="acceptance length", xlim=(0, 1))
    length.set_ylim(bottom=1)
    for axes in (rate, length):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)


def _known(
    places: "range | tuple[float, ...] | list[float | None]", values: list[float | None]
) -> tuple[list[float], list[float]]:
    """Without the points that have no value."""
    points = [(x, y) for x, y in zip(places, values, strict=True) if x is not None and y is not None]
    return [x for x, _ in points], [y for _, y in points]


def _plain(name: str) -> str:
    """A legend's text: matplotlib hides labels that begin with an underscore and reads dollar signs as formulas."""
    return name.lstrip("_").replace("$", r"\$")
