"""Tables of text, for the terminal and for reports."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["ABSENT", "TextTable", "show_tables"]

ABSENT = "–"


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
    """Prints tables."""
    for text in tables:
        table = Table(title=text.title, title_justify="left")
        for index, column in enumerate(text.columns):
            table.add_column(column, justify="right" if index else "left")
        for index, row in enumerate(text.rows):
            table.add_row(*map(escape, row), end_section=text.summary and index == len(text.rows) - 2)
        console.print(table)
