"""An evaluation's report as a page with pictures."""

import json
import re
import shutil
from base64 import b64decode
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dspark.runtime.evaluation import report as report_module
from dspark.runtime.evaluation.evaluator import Evaluation
from tests.support.calibration import calibrated
from tests.support.command_line import Run
from tests.support.reference_rounds import dataset_files

GoldenBundle = Callable[[str], Path]


class Page(HTMLParser):
    """A page's references and cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe")
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


@pytest.mark.parametrize(
    ("name", "temperatures", "pictures"),
    [
        ("dspark_vanilla", (2.0,) * 5, ["acceptance", "reliability", "threshold"]),
        ("dspark_vanilla", None, ["acceptance", "reliability", "threshold"]),
        ("eagle3", None, ["acceptance"]),
    ],
)
def test_report(
    name: str,
    temperatures: tuple[float, ...] | None,
    pictures: list[str],
    run: Run,
    golden_bundle: GoldenBundle,
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    bundle = Path(shutil.copytree(golden_bundle(name), tmp_path / name))
    if temperatures:
        calibrated(bundle, *temperatures)
    files = dataset_files(tmp_path, name)
    odd = files[1].rename(tmp_path / "_<b>$x$ & é.jsonl")
    report = tmp_path / "deep" / "report"
    result = run("evaluate", bundle, "--input", files[0], odd, "--report", report, "--json")
    assert (result.code, result.error) == (0, "")
    assert {file.name for file in report.iterdir()} == {
        "evaluation.json",
        "index.html",
        *(f"{p}.png" for p in pictures),
    }
    assert json.loads((report / "evaluation.json").read_text()) == json.loads(result.out)
    html = (report / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w|url\(|@import", re.sub(r"base64,[^\"]*", "", html))
    page = Page(html)
    embedded = [b64decode(reference.removeprefix("data:image/png;base64,")) for reference in page.references]
    assert embedded == [(report / f"{picture}.png").read_bytes() for picture in pictures]
    assert all(picture.startswith(b"\x89PNG\r\n\x1a\n") for picture in embedded)
    assert all(picture.rstrip().endswith(b"IEND\xaeB`\x82") for picture in embedded)
    assert {"first", "_<b>$x$ & é", "macro average"} <= set(page.text)
    length = json.loads(result.out)["macro_average"]["acceptance"]["length"]
    assert f"{length:.2f}" in page.text


def test_a_report_replaces_an_earlier_one(run: Run, golden_bundle: GoldenBundle, prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "report"
    report.mkdir()
    (report / "mine.txt").write_text("kept")
    for name, others in (("dspark_vanilla", {"reliability.png", "threshold.png"}), ("dflash", set[str]())):
        arguments = ["--samples", "1", "--max-new-tokens", "9", "--report", report]
        assert run("evaluate", golden_bundle(name), "--input", prompts, *arguments).code == 0
        expected = {"mine.txt", "evaluation.json", "index.html", "acceptance.png", *others}
        assert {file.name for file in report.iterdir()} == expected
        assert Evaluation.model_validate_json((report / "evaluation.json").read_text()).drafter.name == name


def test_a_report_that_cannot_be_drawn_is_not_begun(
    run: Run, golden_bundle: GoldenBundle, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def broken(*_: object) -> None:
        raise OSError("no more memory for pictures")

    monkeypatch.setattr(report_module, "_draw_sweep", broken)
    report = tmp_path / "report"
    arguments = ["--samples", "1", "--max-new-tokens", "9", "--report", report]
    result = run("evaluate", golden_bundle("dspark_vanilla"), "--input", prompts, *arguments)
    assert result.code == 1
    assert "no more memory for pictures" in result.error
    assert not report.exists()
