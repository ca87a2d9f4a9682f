"""Cost tables: measured, kept, refused, interpolated, shown."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dspark.providers import OnnxRuntimeProvider, find_provider
from dspark.runtime import Bundle, BundleError, DSparkInference, SamplingParams
from dspark.runtime.costs import measure as measuring
from dspark.runtime.costs.measure import Grid, brief_grid, full_grid, measure, outliers
from dspark.runtime.costs.model import CostModel
from dspark.runtime.costs.store import COST_FOLDER, cost_file, cost_key, read_costs, write_costs
from dspark.runtime.costs.table import CostKey, CostTable, StepCurve
from dspark.runtime.reports import pictures
from tests.costs import KEY, cost_table
from tests.runtime.command_line import Run
from tests.runtime.golden_models import Arrays, tampered_sessions

GoldenBundle = Callable[[str], Path]
CPU = find_provider("cpu")


@pytest.fixture
def copied(golden_bundle: GoldenBundle, tmp_path: Path) -> Path:
    """A bundle without a table."""
    path = tmp_path / "bundle"
    shutil.copytree(golden_bundle("dspark_vanilla"), path, ignore=shutil.ignore_patterns(COST_FOLDER))
    return path


def key_of(path: Path) -> CostKey:
    return cost_key(Bundle.open(path), CPU, 1)


def drafts(requests: list[int], rates: Sequence[float] = (1, 1, 1, 1), context: int = 128) -> dict[str, list[Any]]:
    curve = {"context_length": context, "sample_requests": requests, "sample_drafts_per_sec": [*rates]}
    return {"draft_curves": [curve]}


# --- the file ---


def test_a_table_comes_back_as_it_was(copied: Path) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    assert read_costs(bundle, key) is None
    table = cost_table(key=key)
    assert write_costs(bundle, table) == cost_file(bundle, key)
    assert read_costs(bundle, key) == table
    stored = json.loads(cost_file(bundle, key).read_text())
    assert stored["max_batch_tokens"] == 48
    curve = next(curve for curve in stored["curves"] if (curve["requests"], curve["context_length"]) == (2, 128))
    assert curve["sample_batch_tokens"] == [2, 4, 6, 8, 10, 12]
    assert curve["sample_steps_per_sec"][1] == pytest.approx(1e3 / (5 + 2 + 0.5))


def test_the_key_says_where_it_was_measured(copied: Path) -> None:
    key = key_of(copied)
    assert "cores" in key.device
    assert key.threads == 1
    assert set(key.versions) == {"dspark-onnx", "onnxruntime"}
    assert {"target.onnx", "drafter.onnx", "head.onnx", "weights.bin"} <= set(key.files)
    assert key.file_name == cost_key(Bundle.open(copied), CPU, 1).file_name
    assert key.file_name != cost_key(Bundle.open(copied), CPU, 2).file_name


def test_a_table_of_another_accelerator_is_not_used(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, host, told = Bundle.open(copied), key_of(copied).device, list[str]()

    def key_on(device: str) -> CostKey:
        monkeypatch.setattr(OnnxRuntimeProvider, "device_name", lambda *_: device)
        return key_of(copied)

    small, large = key_on("Abacus 10"), key_on("Abacus 12")
    assert (small.device, large.device) == (f"Abacus 10, {host}", f"Abacus 12, {host}")
    file = write_costs(bundle, cost_table(key=small))
    assert read_costs(bundle, large) is None
    DSparkInference.load(copied, threads=1, batch_size=1, notify=told.append)
    assert told == [f"Measuring briefly what steps cost on this device: {cost_file(bundle, large)}"]
    file.rename(cost_file(bundle, large))
    with pytest.raises(BundleError, match=f"was measured with device {small.device}; here it is {large.device}"):
        read_costs(bundle, large)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "Abacus, 1 cores"}, "was measured with device Abacus, 1 cores; here it is "),
        ({"provider": "cuda"}, "was measured with provider cuda; here it is cpu"),
        ({"threads": 3}, "was measured with threads 3; here it is 1"),
        ({"precision": {"target": "int8"}}, "was measured with precision drafter None; here it is fp32"),
        ({"files": {}}, "was measured with files drafter.onnx None; here it is "),
        ({"versions": {"onnxruntime": "1.2", "dspark-onnx": "0.1.0"}}, "versions onnxruntime 1.2; here it is "),
    ],
)
def test_a_table_from_elsewhere_is_refused(change: dict[str, object], message: str, copied: Path) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    write_costs(bundle, cost_table(key=key))
    foreign = cost_table(key=key.model_copy(update=change))
    cost_file(bundle, key).write_text(foreign.model_dump_json())
    with pytest.raises(BundleError) as raised:
        read_costs(bundle, key)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{cost_file(bundle, key)}: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "Invalid JSON"),
        ({"schema_version": 3}, "schema version 3; this runtime reads version 2"),
        ({"curves": []}, "curves: Tuple should have at least 1 item"),
        ({"draft_curves": []}, "draft_curves: Tuple should have at least 1 item"),
        (drafts([1]), "sample_drafts_per_sec has 4 values and sample_requests 1; they must be equally long"),
        (drafts([2, 4, 6, 8]), r"sample_requests is \[2, 4, 6, 8\]; it must rise, from 1 on"),
        (drafts([1, 4, 2, 8]), r"sample_requests is \[1, 4, 2, 8\]; it must rise, from 1 on"),
        (drafts([1, 2, 2, 8]), r"sample_requests is \[1, 2, 2, 8\]; it must rise, from 1 on"),
        (
            drafts([1, 2, 4, 8], [1, 1e-320, 1, 1]),
            "per_sec.1: Input should be greater than or equal to 0.000001, not 1e-320",
        ),
        (
            {"draft_curves": 2 * drafts([1, 2, 4, 8])["draft_curves"]},
            r"context_length of draft_curves is \[128, 128\]; it must rise, from 128 on",
        ),
        ({"max_batch_tokens": 47}, "max_batch_tokens is 47; the largest of sample_batch_tokens is 48"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
    ],
)
def test_a_damaged_table_is_refused(change: str | dict[str, object], message: str, copied: Path) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    file = write_costs(bundle, cost_table(key=key))
    content = json.loads(file.read_text())
    file.write_text(change if isinstance(change, str) else json.dumps(content | change))
    with pytest.raises(BundleError, match=message):
        read_costs(bundle, key)


def test_a_table_with_a_key_twice_is_refused(copied: Path) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    file = write_costs(bundle, cost_table(key=key))
    file.write_text(file.read_text().replace('"brief"', '"brief": true, "brief"'))
    with pytest.raises(BundleError) as raised:
        read_costs(bundle, key)
    assert str(raised.value) == f"{file}: key 'brief' stands there twice"


@pytest.mark.parametrize(
    ("kept", "changes", "message"),
    [
        ([0, 2, 3, 4], {}, "curves has none of 1 request at the smallest context_length, 128"),
        ([2, 3, 4], {}, "curves has none of 1 request at the smallest context_length, 128"),
        ([0, 1, 2, 2, 3, 4], {}, "curves has requests 2 at context_length 128 twice; it must be there once"),
        (
            [0, 1, 2, 3, 4],
            {3: {"context_length": 256}},
            "curves has requests 4 at context_length 256; beyond the smallest, 128, there must be only 1 request",
        ),
        (
            [0, 1, 2, 3, 4],
            {0: {"sample_batch_tokens": [1, 2, 3, 4, 5, 7]}},
            "curves has requests 1 at context_length 1024 with sample_batch_tokens [1, 2, 3, 4, 5, 7]; "
            "all of 1 request must have [1, 2, 3, 4, 5, 6]",
        ),
        (
            [0, 1, 2, 3, 4],
            {2: {"sample_batch_tokens": [2, 4, 6, 8, 10, 10**30]}},
            "curves.2.sample_batch_tokens.5: Input should be less than or equal to 1048576, not 1000",
        ),
    ],
)
def test_curves_that_contradict_each_other_are_refused(
    kept: list[int], changes: dict[int, dict[str, object]], message: str, copied: Path
) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    file = write_costs(bundle, cost_table(key=key))
    content = json.loads(file.read_text())
    content["curves"] = [content["curves"][index] | changes.get(index, {}) for index in kept]
    file.write_text(json.dumps(content))
    with pytest.raises(BundleError) as raised:
        read_costs(bundle, key)
    assert str(raised.value).startswith(f"{file}: {message}")


RATES = st.floats(1e-6, 1e12)
WILD = st.one_of(
    st.sampled_from([0, 1, 2, 3, 64, 128, 1 << 20, 1 << 30, 10**30, 1e-320, 1e300]),
    st.lists(st.sampled_from([1, 2, 3, 4, 1 << 20, 1 << 30, 10**30]), max_size=4),
    st.lists(st.sampled_from([1e-320, 1e-6, 1.0, 1e12, 1e300]), max_size=4),
)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Content of a table that was right, before up to two things in it were overwritten, left out or doubled."""
    lengths = sorted({1, *draw(st.sets(st.integers(2, 9), max_size=3))})
    numbers = sorted({1, *draw(st.sets(st.integers(2, 1024), max_size=2))})
    near = draw(st.sampled_from([64, 128]))
    curves = [
        {
            "requests": number,
            "context_length": context,
            "sample_batch_tokens": [number * length for length in lengths],
            "sample_steps_per_sec": [draw(RATES) for _ in lengths],
        }
        for number, context in [(1, draw(st.sampled_from([256, 1 << 30]))), *((number, near) for number in numbers)]
    ]
    content: dict[str, Any] = {
        "key": KEY.model_dump(),
        "max_batch_tokens": numbers[-1] * lengths[-1],
        "curves": curves,
        **drafts(numbers, [draw(RATES) for _ in numbers], near),
    }
    if draw(st.booleans()):
        content["draft_curves"] += drafts([1], [draw(RATES)], draw(st.sampled_from([256, 1 << 30])))["draft_curves"]
    for _ in range(draw(st.integers(0, 2))):
        curve = draw(st.sampled_from(curves)) if curves else content
        match draw(st.sampled_from(["overwrite", "overwrite a curve", "leave out", "double"])):
            case "overwrite":
                part = draw(st.sampled_from([content, *content["draft_curves"]]))
                part[draw(st.sampled_from(sorted({*part} - {"key", "curves", "draft_curves"})))] = draw(WILD)
            case "overwrite a curve":
                curve[draw(st.sampled_from(sorted(curve)))] = draw(WILD)
            case "leave out":
                content["curves"] = curves = [each for each in curves if each is not curve]
            case "double":
                content["curves"] = curves = [*curves, dict(curve)]
    return content


@settings(max_examples=150)
@given(
    content=tables(), requests=st.integers(1, 1024), context=st.integers(0, 1 << 30), draft_tokens=st.integers(0, 64)
)
def test_whatever_is_accepted_answers_every_query(
    content: dict[str, Any], requests: int, context: int, draft_tokens: int
) -> None:
    try:
        table = CostTable.model_validate_json(json.dumps(content))
    except ValidationError:
        reject()
    model = CostModel(table)
    counts = np.arange(draft_tokens + 1)
    for longest in (1 + counts, 1 - (-counts // requests)):  # all for one request, or shared
        seconds = model.step_seconds(requests, context, counts, longest)
        assert seconds.shape == counts.shape
        assert np.isfinite(seconds).all()
        assert (seconds > 0).all()
    assert 0 < model.draft_seconds(requests, context) < float("inf")


@pytest.mark.parametrize("brief", [True, False])
def test_a_brief_measurement_replaces_only_a_brief_one(brief: bool, copied: Path) -> None:
    bundle, key, told = Bundle.open(copied), key_of(copied), list[str]()
    write_costs(bundle, cost_table(max_requests=2, key=key).model_copy(update={"brief": brief}))
    DSparkInference.load(copied, threads=1, batch_size=4, notify=told.append)
    assert "was measured with 2 requests at most; there can be 4" in told[0]
    table = read_costs(bundle, key)
    assert table is not None
    assert table.max_requests == (4 if brief else 2)


@pytest.mark.parametrize(
    ("tokens", "rates", "message"),
    [((1, 2), (1.0,), "equally long"), ((2, 3), (1.0, 1.0), "must rise"), ((1, 1), (1.0, 1.0), "must rise")],
)
def test_a_curve_that_makes_no_sense(tokens: tuple[int, ...], rates: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCurve(requests=1, context_length=64, sample_batch_tokens=tokens, sample_steps_per_sec=rates)


# --- the model ---


def even_steps(table: CostTable, requests: int, context: int, draft_tokens: int) -> np.ndarray:
    """Time of steps in which all requests verify equally many of 0, 1, … draft tokens, as far as that goes."""
    counts = np.arange(draft_tokens + 1)
    return CostModel(table).step_seconds(requests, context, counts, 1 + counts // requests)


def test_attention_computes_every_request_as_if_it_were_the_longest() -> None:
    """A token of a step costs 0.5, and 0.001 for each token of context."""

    def step(requests: int, tokens: int, context: int) -> float:
        return 5 + 0.5 * tokens + 0.001 * tokens * context

    model, context = CostModel(cost_table(step)), 640
    found = model.step_seconds(4, context, np.array([8, 5, 5]), np.array([3, 6, 3]))
    expected = [
        5 + 0.5 * (4 + verified) + 0.001 * 4 * longest * context for verified, longest in ((8, 3), (5, 6), (5, 3))
    ]
    np.testing.assert_allclose(found, np.multiply(expected, 1e-3))


@pytest.mark.parametrize(("requests", "context"), [(1, 128), (2, 128), (3, 128), (5, 640), (8, 1024), (8, 4096)])
def test_linear_costs_are_interpolated_exactly(requests: int, context: int) -> None:
    found = even_steps(cost_table(), requests, context, requests * 5)
    tokens = requests + np.arange(requests * 5 + 1)
    np.testing.assert_allclose(found, 1e-3 * (5 + 0.5 * tokens + requests * context / 512))
    drafting = CostModel(cost_table()).draft_seconds(requests, context)
    assert drafting == pytest.approx(1e-3 * (0.5 + 0.1 * requests + requests * context / 4096))


def test_noise_does_not_make_more_tokens_cheaper() -> None:
    generator = np.random.default_rng(0)
    noisy = cost_table(lambda requests, tokens, context: 10 + 0.1 * tokens + generator.random())
    for requests in range(1, 9):
        assert (np.diff(even_steps(noisy, requests, 2048, 5 * requests)) >= 0).all()


# --- measuring ---


def test_what_is_measured_is_what_calls_take(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only graph calls move."""
    now = 0.0

    def take_time(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        nonlocal now
        if graph == "target":
            slow = 1000 if len(takes) == 17 else 0  # once
            takes.append((inputs["pad_index"].shape[0], len(inputs["input_ids"])))
            requests, tokens = takes[-1]
            now += 10 + tokens + 0.01 * requests * inputs["past.0.key"].shape[2] + slow
        else:
            if graph == "drafter":
                now += 2.0 + 0.001 * inputs["context.0.key"].shape[2]
            assert graph == "head" or inputs["context.0.key"][:, :, :100].all()  # as it takes time to read a full cache

    takes: list[tuple[int, int]] = []
    monkeypatch.setattr(measuring, "perf_counter", lambda: now)
    bundle = Bundle.open(copied)
    grid = Grid(requests=(1, 3), tokens=(1, 2, 6), repeats=5)
    profile = measure(bundle, tampered_sessions(bundle, take_time), grid)
    assert {shape.tokens for shape in profile.steps} == {1, 2, 6}
    assert {(shape.requests, shape.context_length) for shape in profile.steps} == {(1, 128), (3, 128), (1, 512)}
    for shape, times in profile.steps.items():
        tokens, requests = shape.requests * shape.tokens, shape.requests
        expected = 10 + tokens + 0.01 * requests * shape.context_length
        assert sorted(times)[: len(times) // 2 + 1] == pytest.approx([expected] * (len(times) // 2 + 1))
    expected_drafts = {(128, 1): 2.128, (128, 3): 2.128, (512, 1): 2.512}
    assert {place: pytest.approx([time] * 5) for place, time in expected_drafts.items()} == profile.drafts
    table = profile.table(key_of(copied))
    assert table.max_batch_tokens == 18
    seconds = even_steps(table, 2, 320, 10)
    np.testing.assert_allclose(seconds, 10 + np.arange(2, 13) + 0.01 * 2 * 320)
    assert CostModel(table).draft_seconds(2, 320) == pytest.approx(2.128 + 0.001 * 2 * (320 - 128))
    assert max(time for times in profile.steps.values() for time in outliers(times)) > 1000


def test_grids() -> None:
    assert full_grid(8, 7, 11) == Grid((1, 2, 4, 8), (1, 2, 3, 4, 5, 6, 7, 8), 11)
    assert full_grid(6, 15, 3).requests == (1, 2, 4, 6)
    assert full_grid(1, 15, 3).tokens == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    assert brief_grid(1, 1).tokens == (1, 2)
    for requests, length in ((1, 1), (2, 2), (8, 7), (64, 15)):
        for grid in (full_grid(requests, length, 3), brief_grid(requests, length)):
            assert (grid.requests[0], grid.requests[-1]) == (1, requests)
            assert (grid.tokens[0], grid.tokens[-1]) == (1, length + 1)


def test_outliers() -> None:
    assert outliers([1.0]) == []
    assert outliers([1.0, 1.1, 0.9, 1.05, 0.95, 3.0]) == [3.0]


@pytest.mark.parametrize("name", ["dspark_vanilla", "dflash", "eagle3"])
def test_a_bundle_without_a_table_measures_itself_once(name: str, golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    path = shutil.copytree(golden_bundle(name), tmp_path / "new", ignore=shutil.ignore_patterns(COST_FOLDER))
    told: list[str] = []

    def load(batch_size: int) -> DSparkInference:
        told.clear()
        return DSparkInference.load(path, threads=1, batch_size=batch_size, notify=told.append)

    model = load(4)
    file = cost_file(Bundle.open(path), key_of(path))
    assert told == [f"Measuring briefly what steps cost on this device: {file}"]
    assert CostTable.model_validate_json(file.read_bytes()).max_requests == 4
    assert model.generate(["the "], SamplingParams(max_new_tokens=8))[0].finish_reason == "length"
    load(3)
    assert told == []
    load(6)
    assert "4 requests at most; there can be 6; measuring briefly" in told[0]
    load(6)
    assert told == []


def test_another_versions_table_is_replaced(copied: Path) -> None:
    bundle, key, told = Bundle.open(copied), key_of(copied), list[str]()
    write_costs(bundle, cost_table(key=key))
    old = cost_table(key=key.model_copy(update={"versions": {**key.versions, "onnxruntime": "1.2"}}))
    cost_file(bundle, key).write_text(old.model_dump_json())
    DSparkInference.load(copied, threads=1, batch_size=1, notify=told.append)
    assert "versions onnxruntime 1.2; here it is" in told[0]
    assert told[0].endswith("; measuring anew")
    assert read_costs(bundle, key) not in (None, old)


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


# --- the command ---


def test_profile_writes_a_table_and_a_picture(run: Run, copied: Path) -> None:
    result = run("profile", copied, "--max-requests", "2", "--repeats", "2")
    assert (result.code, result.error) == (0, "")
    bundle, key = Bundle.open(copied), key_of(copied)
    table, file = read_costs(bundle, key), cost_file(bundle, key)
    assert table is not None
    assert {(curve.requests, curve.context_length) for curve in table.curves} == {(1, 128), (2, 128), (1, 512)}
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert f"Written: {file}, and a picture beside it" in result.out
    for text in ("Steps", "Drafts", "outliers"):
        assert text in result.out
    generated = run("generate", copied, "--prompt", "the ", "--batch-size", "2")
    assert (generated.code, generated.error) == (0, "")


def test_profile_without_matplotlib(run: Run, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    result = run("profile", copied, "--max-requests", "1", "--repeats", "1")
    assert "no picture: pip install 'dspark-onnx[report]'" in result.out
    assert [file.suffix for file in (copied / COST_FOLDER).iterdir()] == [".json"]
    shown = run("profile", copied, "--max-requests", "1", "--repeats", "1", "--json")
    assert CostTable.model_validate_json(shown.out) == read_costs(Bundle.open(copied), key_of(copied))


def test_what_cannot_be_profiled(run: Run, copied: Path, golden_bundle: GoldenBundle) -> None:
    for arguments, message in (
        ([copied, "--max-requests", "0"], "max_requests is 0; it must be from 1 to 1024"),
        ([copied, "--repeats", "0"], "repeats is 0; it must be at least 1"),
        ([golden_bundle("qwen3_target")], "has no drafter, so there is nothing to schedule"),
    ):
        result = run("profile", *arguments)
        assert (result.code, result.out) == (1, "")
        assert message in result.error


def test_where_nothing_can_be_written_nothing_is_measured(
    run: Run, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / COST_FOLDER).write_text("in the way")
    monkeypatch.setattr("dspark.runtime.commands.app.measure", lambda *_: pytest.fail("measured in vain"))
    result = run("profile", copied)
    assert (result.code, result.out) == (1, "")
    assert re.fullmatch(rf"error: {copied / COST_FOLDER}: cannot be written: .+; nothing was measured\n", result.error)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_what_was_measured_is_shown_even_if_it_cannot_be_kept(
    flags: list[str], run: Run, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("dspark.runtime.costs.store.write_whole", full)
    result = run("profile", copied, "--max-requests", "1", "--repeats", "1", *flags)
    assert (result.code, result.error) == (1, "error: the output cannot be written: No space left on device\n")
    assert ("max_batch_tokens" if flags else "Drafts") in result.out


def test_a_picture_does_not_outlive_its_table(copied: Path) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    drawn = write_costs(bundle, cost_table(key=key), b"first").with_suffix(".png")
    write_costs(bundle, cost_table(key=key), b"second")
    assert drawn.read_bytes() == b"second"
    write_costs(bundle, cost_table(key=key))
    assert not drawn.exists()
