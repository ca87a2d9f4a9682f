"""A table of what the GPU tests measured, at the end of their run."""

from collections.abc import Callable

import pytest

__all__ = ["COLUMNS"]

COLUMNS = ("model", "provider", "precision", "logits off by", "same outputs", "acceptance length", "tokens/s", "plain")
ROWS = pytest.StashKey[list[tuple[str, ...]]]()


@pytest.fixture
def add_row(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Adds a row to the table; columns that are not given stay empty."""
    rows = request.config.stash.setdefault(ROWS, [])

    def add(**values: object) -> None:
        rows.append(tuple(str(values.get(column.replace(" ", "_").replace("/", "_"), "")) for column in COLUMNS))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    terminalreporter.section("measured")
    widths = [max(len(row[index]) for row in (COLUMNS, *rows)) for index in range(len(COLUMNS))]
    for row in (COLUMNS, *rows):
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
