"""The costs that a loaded bundle uses: its table, or a brief measurement that is kept."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.runtime import Bundle, DSparkInference, SamplingParams
from dspark.runtime.costs.store import COST_FOLDER, cost_file, read_costs, write_costs
from dspark.runtime.costs.table import CostTable
from dspark.runtime.loading.costs import find_costs
from tests.support.command_line import Run
from tests.support.costs import copy_without_costs, cost_table, key_of

GoldenBundle = Callable[[str], Path]


@pytest.fixture
def copied(golden_bundle: GoldenBundle, tmp_path: Path) -> Path:
    """A bundle without a table."""
    return copy_without_costs(golden_bundle("dspark_vanilla"), tmp_path / "bundle")


@pytest.mark.parametrize("brief", [True, False])
def test_a_brief_measurement_for_more_requests_is_kept_beside_a_thorough_one(brief: bool, copied: Path) -> None:
    bundle, key, told = Bundle.open(copied), key_of(copied), list[str]()
    first = cost_table(max_requests=2, key=key).model_copy(update={"brief": brief})
    file = write_costs(bundle, first)
    DSparkInference.load(copied, threads=1, batch_size=4, notify=told.append)
    (message,) = told
    assert message.startswith(f"{file}: was measured with 2 requests at most; there can be 4; measuring briefly")
    kept = read_costs(bundle, key, brief=True)
    assert kept is not None
    assert (kept.brief, kept.max_requests) == (True, 4)
    assert read_costs(bundle, key) == (None if brief else first)


def test_the_second_load_does_not_measure(run: Run, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor any other, whichever of the two tables it takes."""
    bundle, key = Bundle.open(copied), key_of(copied)
    thorough = cost_table(max_requests=2, key=key)
    write_costs(bundle, thorough)
    arguments = ("generate", copied, "--prompt", "the ", "--max-new-tokens", "4", "--batch-size")
    assert "measuring briefly for now" in run(*arguments, "8").error
    monkeypatch.setattr("dspark.runtime.loading.costs.measure", lambda *_: pytest.fail("measured again"))
    taken: list[CostTable | None] = []

    def noted(*arguments: Any, **options: Any) -> CostTable | None:
        taken.append(find_costs(*arguments, **options))
        return taken[-1]

    monkeypatch.setattr("dspark.runtime.loading.loaded.find_costs", noted)
    for batch_size in ("8", "2", "5"):
        assert run(*arguments, batch_size).error == ""
    brief = read_costs(bundle, key, brief=True)
    assert brief is not None
    assert taken == [brief, thorough, brief]


@pytest.mark.parametrize("name", ["dspark_vanilla", "dflash", "eagle3"])
def test_a_bundle_without_a_table_measures_itself_once(name: str, golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    path = shutil.copytree(golden_bundle(name), tmp_path / "new", ignore=shutil.ignore_patterns(COST_FOLDER))
    told: list[str] = []

    def load(batch_size: int) -> DSparkInference:
        told.clear()
        return DSparkInference.load(path, threads=1, batch_size=batch_size, notify=told.append)

    model = load(4)
    file = cost_file(Bundle.open(path), key_of(path), brief=True)
    assert told == [f"Measuring briefly what steps cost on this device: {file}"]
    assert CostTable.model_validate_json(file.read_bytes()).max_requests == 4
    assert model.generate(["the "], SamplingParams(max_new_tokens=8))[0].finish_reason == "length"
    load(3)
    assert told == []
    load(6)
    assert "4 requests at most; there can be 6; measuring briefly" in told[0]
    load(6)
    assert told == []


def test_another_versions_table_is_not_used(copied: Path) -> None:
    bundle, key, told = Bundle.open(copied), key_of(copied), list[str]()
    write_costs(bundle, cost_table(key=key))
    old = cost_table(key=key.model_copy(update={"versions": {**key.versions, "onnxruntime": "1.2"}}))
    cost_file(bundle, key).write_text(old.model_dump_json())
    DSparkInference.load(copied, threads=1, batch_size=1, notify=told.append)
    assert "versions onnxruntime 1.2; here it is" in told[0]
    assert told[0].endswith("; measuring anew")
    assert read_costs(bundle, key, brief=True) is not None
    told.clear()
    DSparkInference.load(copied, threads=1, batch_size=1, notify=told.append)
    assert told == []


def test_where_nothing_can_be_written_only_the_table_is_lost(copied: Path) -> None:
    (copied / COST_FOLDER).write_text("in the way")
    told: list[str] = []
    model = DSparkInference.load(copied, threads=1, batch_size=1, notify=told.append)
    assert told[-1].startswith("The measurement cannot be kept: ")
    assert model.generate(["the "], SamplingParams(max_new_tokens=8))[0].finish_reason == "length"


@pytest.mark.parametrize("flags", [["--scheduler", "off"], ["--scheduler", "fixed"], ["--confidence-threshold", "0.5"]])
def test_who_does_not_ask_what_steps_cost_does_not_measure(flags: list[str], run: Run, copied: Path) -> None:
    assert run("generate", copied, "--prompt", "the ", *flags).error == ""
    assert not (copied / COST_FOLDER).exists()
