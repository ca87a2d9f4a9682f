"""Tables on narrow terminals: figures and headers are never cut."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dspark.runtime.reports.tables import TextTable, show_tables
from tests.support.table_cells import table_cells


def printed(table: TextTable, width: int) -> str:
    screen = io.StringIO()
    show_tables([table], Console(file=screen, width=width))
    return screen.getvalue()


def words(text: str) -> list[str]:
    return re.sub(r"[┏┳┓┃┡╇┩│├┼┤└┴┘━─]", " ", text).split()


def test_a_table_that_fits_stays_whole() -> None:
    table = TextTable("Speed", ["dataset", "plain", "fast"], [["a", "10.5", "21.0"], ["all", "10.5", "21.0"]], True)
    out = printed(table, 80)
    assert "continued" not in out
    assert out.count("├") == 1  # the summary stands apart
    assert table_cells(out) == {
        (name, head): value for name in ["a", "all"] for head, value in [("plain", "10.5"), ("fast", "21.0")]
    }


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_wide_table_goes_on_below(width: int) -> None:
    columns = [f"c{index}" for index in range(25)]
    rows = [
        [name, *(f"{base + index}.{index:03}" for index in range(1, 25))] for name, base in (("x", 100), ("y", 500))
    ]
    out = printed(TextTable("Wide", ["name", *columns[1:]], rows), width)
    assert max(map(len, out.splitlines())) <= width
    assert "Wide, continued" in out
    assert table_cells(out) == {(row[0], columns[index]): row[index] for row in rows for index in range(1, 25)}


TEXTS = st.text("abc ", min_size=1, max_size=30).map(str.strip).filter(bool)


@given(st.data(), st.integers(1, 12), st.integers(80, 120))
def test_every_figure_and_every_word_of_a_header_appears_in_full(data: st.DataObject, count: int, width: int) -> None:
    heads = data.draw(st.lists(TEXTS, min_size=count, max_size=count))
    figures = data.draw(
        st.lists(st.integers(0, 10**12).map(lambda value: f"{value:,}"), min_size=count, max_size=count)
    )
    out = printed(TextTable("t", ["dataset", *heads], [["set", *figures]]), width)
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= width
    for word in [*figures, *" ".join(heads).split()]:
        assert word in words(out)


def test_a_long_name_goes_on_in_the_next_line() -> None:
    name = "questions-from-people-" * 5
    out = printed(TextTable("t", ["dataset", *map(str, range(9))], [[name, *["123.456"] * 9]]), 80)
    first = "".join(line.strip("│").split("│")[0].strip() for line in out.splitlines() if line.startswith("│"))
    assert first.startswith(name)
    assert words(out).count("123.456") == 9


def test_a_list_of_figures_is_broken_between_them() -> None:
    figures = [f"{index}.25" for index in range(100, 140)]
    out = printed(TextTable("Steps", ["requests", "outliers"], [["1", ", ".join(figures)]]), 80)
    assert max(map(len, out.splitlines())) <= 80
    assert [word.strip(",") for word in words(out) if ".25" in word] == figures
