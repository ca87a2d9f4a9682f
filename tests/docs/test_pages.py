"""The Markdown files: short where they have to be, links that lead somewhere, plots of the figures that pages have."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from markdown_it.token import Token

from tests.docs.blocks import ROOT, tokens

FILES = sorted(
    path.relative_to(ROOT)
    for path in [
        *ROOT.glob("*.md"),
        *(file for top in ("docs", "examples", "samples", "tests") for file in (ROOT / top).rglob("*.md")),
    ]
)
EXPLANATIONS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "explanation").glob("*.md"))


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", FILES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _links(tokens(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link} leads nowhere"
        if anchor:
            assert anchor in _anchors(target), f"{page}: {link} has no such heading"


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", *EXPLANATIONS], ids=str)
def test_files_that_are_named_exist(page: str) -> None:
    folders = "/|" if page == "ARCHITECTURE.md" else ""  # elsewhere they may be those of a bundle
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        beside: list[Path] = []
        for name, to_come in re.findall(rf"`([\w./-]+(?:{folders}\.py|\.jinja))`( \(to come\))?", line):
            found = [path for folder in (ROOT, ROOT / "runtime", *beside) if (path := folder / name).exists()]
            assert bool(found) != bool(to_come), f"{page}: {name}"
            beside += [path if path.is_dir() else path.parent for path in found]


def test_the_map_names_every_folder() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name in ("exporter", "providers", "runtime"):
        for init in (ROOT / name).rglob("__init__.py"):
            folder = init.parent.relative_to(ROOT)
            assert f"`{folder}/`" in page or f"`{folder.relative_to(name)}/`" in page or str(folder) == name, folder


def test_every_row_of_the_table_of_changes_names_a_file() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("\n## Where to change what\n")[2]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    assert [row for row in rows if not re.search(r"`[\w/]+(/|\.py)`", row)] == []


def test_plots_show_the_figures_of_the_pages() -> None:
    for name, figures in json.loads((ROOT / "docs" / "figures.json").read_text(encoding="utf-8")).items():
        page = (ROOT / "docs" / figures["source"].partition(",")[0]).read_text(encoding="utf-8")
        for value in _numbers({key: values for key, values in figures.items() if key != "source"}):
            assert re.search(rf"(?<![\d.]){re.escape(value)}(?![\d.]\d)", page), f"{name}: {value}"


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_forms(form: Path) -> None:
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.name != "config.yml":
        assert {"name", "description", "body"} <= content.keys()
        assert all(field["attributes"]["label"] for field in content["body"])


def _links(page: list[Token]) -> list[str]:
    inline = [child for token in page for child in token.children or []]
    return [str(child.attrs[key]) for child in inline for key in ("href", "src") if key in child.attrs]


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    parsed, seen = tokens(page.resolve().relative_to(ROOT)), Counter[str]()
    anchors = set()
    for heading, content in pairwise(parsed):
        if heading.type == "heading_open":
            text = "".join(child.content for child in content.children or [])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return anchors


def _numbers(figures: object) -> list[str]:
    if isinstance(figures, dict):
        return [number for value in figures.values() for number in _numbers(value)]
    if isinstance(figures, list):
        return [number for value in figures for number in _numbers(value)]
    return (
        [f"{figures:.2f}" if isinstance(figures, float) else str(figures)] if isinstance(figures, (int, float)) else []
    )
