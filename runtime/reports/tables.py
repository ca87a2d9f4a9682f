"""Tables of text, for the terminal and for reports."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["ABSENT", "TextTable", "show_tables"]

ABSENT = "–"
FRAME = 3
"""Characters that a column's padding and border take; the table has one border more."""
NAMES_SHARE = 1 / 3
"""Names take this part of the width at most, if not everything fits beside them; longer ones go on in the next line."""


@dataclass(frozen=True)
class TextTable:
    """A table whose first column names its rows.

    Attributes:
        title: What it shows.
        columns: Heads of the columns.
        rows: Cells.
        summary: Whether the last row sums up the others.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    summary: bool = False


def show_tables(tables: Sequence[TextTable], console: Console) -> None:
    """Prints tables; one that is wider than the console goes on below, so that no figure is cut."""
    for table in tables:
        for part, columns in enumerate(_parts(table, console.width)):
            console.print(_drawn(table, columns, f"{table.title}, continued" if part else table.title))


def _parts(table: TextTable, width: int) -> Iterator[dict[int, int]]:
    """The columns of each part and their widths; every part begins with the names."""
    cells = [max((cell_len(row[index]) for row in table.rows), default=0) for index in range(len(table.columns))]
    whole = [max(cell_len(head), longest) for head, longest in zip(table.columns, cells, strict=True)]
    if _total(whole) <= width:
        yield dict(enumerate(whole))
        return
    # Heads are broken between words, names anywhere; a cell that is still too long has several figures.
    narrow = [max(_longest_word(head), longest) for head, longest in zip(table.columns, cells, strict=True)]
    names = min(narrow[0], max(_longest_word(table.columns[0]), int(width * NAMES_SHARE)))
    room = width - _total([names, 0])
    part = {0: names}
    for index, wanted in enumerate(narrow[1:], start=1):
        column = min(wanted, room)
        if len(part) > 1 and _total([*part.values(), column]) > width:
            yield part
            part = {0: names}
        part[index] = column
    yield part


def _drawn(text: TextTable, columns: dict[int, int], title: str) -> Table:
    table = Table(title=escape(title), title_justify="left")
    for index, width in columns.items():
        table.add_column(
            escape(text.columns[index]), justify="right" if index else "left", width=width, overflow="fold"
        )
    for place, row in enumerate(text.rows):
        last = text.summary and place == len(text.rows) - 2
        table.add_row(*(escape(row[index]) for index in columns), end_section=last)
    return table


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + FRAME * len(widths) + 1


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)
