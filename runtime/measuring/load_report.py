"""A load benchmark as tables, and as a folder with ``load.json`` and pictures."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dspark.runtime.bundle.files import write_whole
from dspark.runtime.measuring.load_figures import LoadCell, LoadReport, Percentiles
from dspark.runtime.reports.pictures import picture
from dspark.runtime.reports.tables import ABSENT, TextTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["load_table", "write_load_report"]

Draw: TypeAlias = "Callable[[LoadReport, Axes], None]"


def load_table(report: LoadReport) -> TextTable:
    """All figures, a cell of the benchmark a row."""
    columns = ["scheduler", "users", "all", "each", "first", "between", "verified", "length"]
    rows = []
    for cell in report.cells:
        row = [cell.scheduler, str(cell.concurrency)]
        row += [_number(cell.tokens_per_second, 1), _number(cell.tokens_per_second_per_user, 1)]
        row += [_milliseconds(cell.time_to_first_token), _milliseconds(cell.time_between_tokens)]
        rows.append([*row, _number(cell.verified_tokens, 2), _number(cell.acceptance_length, 2)])
    title = (
        f"{report.bundle} under load: tokens a second of all users and of each; ms to the first token and between "
        "tokens (p50/p99); draft tokens verified and acceptance length, a request and round"
    )
    return TextTable(title, columns, rows)


def write_load_report(report: LoadReport, folder: Path) -> None:
    """Writes ``load.json``, ``throughput.png`` and ``verification.png``; all is rendered before anything is written.

    Args:
        report: What to show.
        folder: Made if it does not exist; files of the same names are replaced.

    Raises:
        OSError: The folder cannot be written.
    """
    pictures = {
        "throughput.png": _picture(report, _draw_throughput),
        "verification.png": _picture(report, _draw_verification),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "load.json", f"{report.model_dump_json(indent=2)}\n".encode())
    for name, content in pictures.items():
        write_whole(folder / name, content)


def _picture(report: LoadReport, draw: Draw) -> bytes:
    def fill(figure: "Figure") -> None:
        axes = figure.subplots()
        draw(report, axes)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)

    return picture((7, 4.5), fill)


def _draw_throughput(report: LoadReport, axes: "Axes") -> None:
    for name, cells in _by_scheduler(report).items():
        places = {
            cell.concurrency: (cell.tokens_per_second_per_user, cell.tokens_per_second)
            for cell in cells
            if cell.tokens_per_second_per_user is not None
        }
        axes.plot([x for x, _ in places.values()], [y for _, y in places.values()], marker="o", label=name)
        for users, place in places.items():
            axes.annotate(str(users), place, (4, 4), textcoords="offset points", fontsize="x-small")
    axes.set(xlabel="tokens a second, a user", ylabel="tokens a second, all users", title=f"{report.bundle} under load")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _draw_verification(report: LoadReport, axes: "Axes") -> None:
    for name, cells in _by_scheduler(report).items():
        verified = {cell.concurrency: cell.verified_tokens for cell in cells if cell.verified_tokens is not None}
        axes.plot(list(verified), list(verified.values()), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(report.settings.concurrencies, map(str, report.settings.concurrencies))
    axes.set(xlabel="users", ylabel="draft tokens verified, a request and round", title=f"{report.bundle} under load")
    axes.set_ylim(bottom=0)


def _by_scheduler(report: LoadReport) -> dict[str, list[LoadCell]]:
    names = dict.fromkeys(cell.scheduler for cell in report.cells)
    return {name: [cell for cell in report.cells if cell.scheduler == name] for name in names}


def _milliseconds(times: Percentiles | None) -> str:
    return ABSENT if times is None else f"{1e3 * times.p50:.0f}/{1e3 * times.p99:.0f}"


def _number(value: float | None, digits: int) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}"
