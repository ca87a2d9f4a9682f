"""``dspark-run evaluate``: its figures against a recount of the reference's rounds, and its report."""

import json
import re
import shutil
import sys
from base64 import b64decode
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.runtime import Bundle, SamplingParams, SpeculationOptions
from dspark.runtime.bundle.calibration import CALIBRATION, confidences
from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.decoding.rounds import Round, RoundTable
from dspark.runtime.evaluation import report as report_module
from dspark.runtime.evaluation.evaluator import Evaluation
from dspark.runtime.evaluation.figures import (
    THRESHOLDS,
    acceptance_figures,
    confidence_figures,
    macro_average,
    sweep_figures,
)
from dspark.runtime.scheduling.scheduler import Batch, ThresholdScheduler
from tests.runtime.command_line import Run
from tests.runtime.evaluation.test_calibration import calibrated
from tests.runtime.golden_models import GOLDEN, PROMPTS, load

GoldenBundle = Callable[[str], Path]
Pairs = list[tuple[int, int]]
"""Verified and accepted draft tokens, a round."""
DATASETS = {"first": [0, 1, 2], "last": [3, 4]}


def reference_rounds(name: str, case: str, prompt: int) -> Pairs:
    """The reference's rounds up to one whose draft was not rejected at once."""
    golden = json.loads((GOLDEN / name / "golden.json").read_text())[case][prompt]
    pairs = list(zip(golden["proposal_lengths"], golden["accepted_draft_lengths"], strict=True))[:-3]
    while pairs[-1][1] == 0:
        pairs.pop()
    return pairs


def ending_with(pairs: Pairs) -> int:
    """The ``max_new_tokens`` at which generation ends with these rounds."""
    return 1 + sum(accepted + 1 for _, accepted in pairs)


def dataset_files(folder: Path, name: str, case: str = "greedy") -> list[Path]:
    files = []
    for dataset, indices in DATASETS.items():
        rows = [
            {"prompt_ids": PROMPTS[index], "max_new_tokens": ending_with(reference_rounds(name, case, index))}
            for index in indices
        ]
        files.append(folder / f"{dataset}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in PROMPTS))
    return file


def recounted(pairs: Pairs) -> dict[str, Any]:
    """Counts and acceptance figures from their definitions."""
    verified, accepted = (sum(column) for column in zip(*pairs, strict=True))
    reached = [sum(v > k and a >= k for v, a in pairs) for k in range(5)]
    stood = [sum(v > k and a > k for v, a in pairs) for k in range(5)]
    return {
        "rounds": len(pairs),
        "verified": verified,
        "accepted": accepted,
        "reached": reached,
        "reached_and_accepted": stood,
        "observed": [sum(v > k for v, _ in pairs) for k in range(5)],
        "length": 1 + accepted / len(pairs),
        "rate": accepted / verified,
        "conditional": [part / whole if whole else None for part, whole in zip(stood, reached, strict=True)],
    }


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("dspark_vanilla", "greedy"),
        ("dspark_gated", "greedy_threshold_0_6"),
        ("dflash", "greedy"),
        ("eagle3", "greedy"),
    ],
)
def test_counts_are_those_of_the_reference(
    name: str, case: str, batch_size: int, run: Run, golden_bundle: GoldenBundle, tmp_path: Path
) -> None:
    files = dataset_files(tmp_path, name, case)
    options = ["--scheduler", "threshold"] if "threshold" in case else []
    result = run(
        "evaluate", golden_bundle(name), "--input", *files, "--batch-size", f"{batch_size}", *options, "--json"
    )
    assert (result.code, result.error) == (0, "")
    evaluation = json.loads(result.out)
    assert list(evaluation["datasets"]) == list(DATASETS)
    pairs = {
        dataset: [pair for index in indices for pair in reference_rounds(name, case, index)]
        for dataset, indices in DATASETS.items()
    }
    expected = {dataset: recounted(each) for dataset, each in pairs.items()}
    found = {**evaluation["datasets"], "all": evaluation["pooled"]}
    everything = recounted([pair for part in pairs.values() for pair in part])
    for dataset, each in [*expected.items(), ("all", everything)]:
        counts, figures = found[dataset]["counts"], found[dataset]["figures"]
        assert counts["prompts"] == counts["greedy_prompts"] == len(DATASETS.get(dataset, PROMPTS))
        for field in ("rounds", "verified", "accepted", "reached", "reached_and_accepted", "observed"):
            assert counts[field] == each[field], field
        for field in ("length", "rate", "conditional"):
            assert figures["acceptance"][field] == pytest.approx(each[field]), field
        tokens = each["accepted"] + each["rounds"]
        assert counts["tokens"] == {"plain": tokens, "speculative": tokens}
        speed = figures["speed"]
        assert speed["identical_outputs"] == 1
        for way in ("plain", "speculative"):
            assert speed[way] == pytest.approx(tokens / counts["seconds"][way])
            assert counts["prefill_seconds"][way] > 0
        assert speed["speedup"] == pytest.approx(speed["speculative"] / speed["plain"])
    macro = evaluation["macro_average"]
    assert macro["acceptance"]["length"] == pytest.approx(fmean(each["length"] for each in expected.values()))
    columns = zip(*(each["conditional"] for each in expected.values()), strict=True)
    means = [fmean(known) if (known := [rate for rate in rates if rate is not None]) else None for rates in columns]
    assert macro["acceptance"]["conditional"] == pytest.approx(means)
    assert (evaluation["drafter"]["name"], evaluation["bundle"]) == (name, name)
    has_confidence = name.startswith("dspark")
    assert set(macro["confidence"]) == set(evaluation["reliability"]) == ({"raw"} if has_confidence else set())
    assert set(macro["sweep"]) == ({"raw"} if has_confidence and case == "greedy" else set())


def own_rounds(bundle: Path, temperature: float, seed: int, count: int) -> RoundTable:
    """What a run of its own records."""
    model = load(bundle, batch_size=5)
    requests = [
        model.request(prompt, SamplingParams(max_new_tokens=count, temperature=temperature, seed=seed + index))
        for index, prompt in enumerate(PROMPTS)
    ]
    model.run(requests)
    return RoundTable.of([item for request in requests for item in request.rounds], 5, confidence=True)


def test_a_calibrated_bundle_has_both_figures(
    run: Run, golden_bundle: GoldenBundle, prompts: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(golden_bundle("dspark_vanilla"), tmp_path / "bundle"))
    temperatures = (3.0, 0.5, 2.0, 1.0, 0.8)
    calibration = calibrated(bundle, *temperatures)
    arguments = ["--temperature", "0.8", "--seed", "7", "--max-new-tokens", "50"]
    evaluation = Evaluation.model_validate_json(run("evaluate", bundle, "--input", prompts, *arguments, "--json").out)
    assert evaluation.calibration == calibration
    table = own_rounds(bundle, 0.8, 7, 50)
    figures = evaluation.pooled.figures
    assert evaluation.pooled.counts.rounds == len(table)
    assert evaluation.pooled.counts.greedy_prompts == 0
    assert figures.speed.identical_outputs is None
    for scaling, values in {"raw": np.ones(5), "calibrated": np.array(temperatures)}.items():
        assert figures.confidence[scaling] == confidence_figures(table, values)  # type: ignore[index]
        assert figures.sweep[scaling] == sweep_figures(table, values)  # type: ignore[index]
    assert figures.confidence["raw"].roc_auc == pytest.approx(figures.confidence["calibrated"].roc_auc)
    assert figures.confidence["raw"].ece != figures.confidence["calibrated"].ece
    assert figures.sweep["raw"] != figures.sweep["calibrated"]


def test_temperature_and_seed_decide(run: Run, golden_bundle: GoldenBundle, prompts: Path) -> None:
    def counts(*arguments: str) -> Any:
        common = ["evaluate", golden_bundle("eagle3"), "--input", prompts, "--max-new-tokens", "30", "--json"]
        found = json.loads(run(*common, *arguments).out)["pooled"]["counts"]
        return {name: value for name, value in found.items() if "seconds" not in name}

    sampled = counts("--temperature", "1")
    assert counts("--temperature", "1", "--seed", "0") == sampled
    assert counts("--temperature", "1", "--batch-size", "4") == sampled
    assert counts("--temperature", "1", "--seed", "1") != sampled
    assert counts() != sampled
    assert counts("--samples", "2")["prompts"] == 2


def test_outputs_that_differ_are_counted(
    run: Run, golden_bundle: GoldenBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three greedy rows one is bent where it drafts; a sampled one does not count."""
    accept = Sampler.accept

    def bent(sampler: Sampler, logits: Any, draft: Any, *others: Any) -> tuple[int, list[int]]:
        accepted, tokens = accept(sampler, logits, draft, *others)
        if len(draft) and sampler.params.max_new_tokens == 21:
            tokens[-1] = ord("~")
        return accepted, tokens

    monkeypatch.setattr(Sampler, "accept", bent)
    rows = [{"prompt_ids": PROMPTS[0], **options} for options in ({}, {"max_new_tokens": 21}, {}, {"temperature": 1.0})]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--max-new-tokens", "20", "--json"]
    found = json.loads(run("evaluate", golden_bundle("dflash"), "--input", file, *arguments).out)["pooled"]
    assert (found["counts"]["prompts"], found["counts"]["greedy_prompts"]) == (4, 3)
    assert found["figures"]["speed"]["identical_outputs"] == pytest.approx(2 / 3)


# --- figures ---

logits = st.floats(-4, 4, width=32)
drafts = st.lists(
    st.integers(0, 4).flatmap(lambda accepted: st.tuples(st.just(accepted), st.tuples(*[logits] * 4))), min_size=1
)


def test_a_hardware_scheduler_is_evaluated(run: Run, golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    """Where it drafts, whole drafts are best by the table of these bundles; by default they are always verified."""
    files = dataset_files(tmp_path, "dspark_vanilla", "greedy")
    arguments = ["evaluate", golden_bundle("dspark_vanilla"), "--input", *files, "--json"]
    default, hardware = (json.loads(run(*arguments, *options).out) for options in ([], ["--scheduler", "hardware"]))
    assert (default["settings"]["scheduler"], hardware["settings"]["scheduler"]) == ("fixed", "hardware")
    counts, expected = hardware["pooled"]["counts"], default["pooled"]["counts"]
    assert counts["rounds"] > 0
    assert counts["verified"] / counts["rounds"] == pytest.approx(expected["verified"] / expected["rounds"], rel=0.05)
    assert default["pooled"]["figures"]["sweep"] != {}
    assert hardware["pooled"]["figures"]["sweep"] == {}  # it would have to know what was cut


def whole_drafts(drafts: Sequence[tuple[int, Sequence[float]]]) -> RoundTable:
    rounds = [Round(4, accepted, False, np.array(values, np.float32)) for accepted, values in drafts]
    return RoundTable.of(rounds, 4, confidence=True)


@given(drafts, st.tuples(*[st.floats(0.1, 10)] * 4))
def test_the_sweep_cuts_as_the_scheduler_does(
    drafts: list[tuple[int, tuple[float, ...]]], temperatures: tuple[float, ...]
) -> None:
    table = whole_drafts(drafts)
    assert table.confidence is not None
    sweep = sweep_figures(table, np.array(temperatures))
    everything = Batch(np.full(len(drafts), 4), np.ones(len(drafts), bool), 64)
    for index, threshold in enumerate(THRESHOLDS):
        probability = confidences(table.confidence, np.array(temperatures, np.float32))
        kept = ThresholdScheduler(threshold).schedule(probability, everything).tolist()
        accepted = [min(length, most) for length, (most, _) in zip(kept, drafts, strict=True)]
        assert sweep.verified_per_round[index] == pytest.approx(fmean(kept))
        assert sweep.acceptance_length[index] == pytest.approx(1 + fmean(accepted))
        rate = sum(accepted) / sum(kept) if any(kept) else None
        assert sweep.acceptance_rate[index] == (None if rate is None else pytest.approx(rate))


def test_a_sweep_by_hand() -> None:
    """Confidences 0.9, 0.6 (both stand) and 0.7, 0.8 (rejected at once)."""
    table = RoundTable.of(
        [
            Round(2, 2, False, np.log(np.array([9, 1.5], np.float32))),
            Round(2, 0, False, np.log(np.array([7 / 3, 4], np.float32))),
        ],
        2,
        confidence=True,
    )
    sweep = sweep_figures(table, np.ones(2))
    found = dict(zip(THRESHOLDS, zip(sweep.verified_per_round, sweep.acceptance_rate, strict=True), strict=True))
    assert found[0.0] == found[0.55] == (2, 0.5)
    assert found[0.65] == (1.5, pytest.approx(1 / 3))
    assert found[0.75] == (0.5, 1)
    assert found[0.95] == (0, None)
    assert sweep.acceptance_length[THRESHOLDS.index(0.55)] == 2
    assert sweep.acceptance_length[THRESHOLDS.index(0.75)] == 1.5


def test_confidence_figures_by_hand() -> None:
    """Position 1: 0.8 stands, 0.4 stands, 0.6 falls; position 2, of the first two drafts: 0.9 stands, 0.5 falls."""
    table = RoundTable.of(
        [
            Round(2, 2, False, np.log(np.array([4, 9], np.float32))),
            Round(2, 1, False, np.log(np.array([2 / 3, 1], np.float32))),
            Round(2, 0, False, np.log(np.array([1.5, 9], np.float32))),
        ],
        2,
        confidence=True,
    )
    figures = confidence_figures(table, np.ones(2))
    assert figures.ece == pytest.approx([(0.2 + 0.6 + 0.6) / 3, (0.1 + 0.5) / 2], abs=1e-6)
    assert figures.roc_auc == [0.5, 1]
    assert figures.brier == pytest.approx([(0.04 + 0.36 + 0.36) / 3, (0.01 + 0.25) / 2], abs=1e-6)
    # Survivals 0.72 (stands), 0.2 and 0.54 (fall), each in a bin of its own.
    assert figures.survival_ece == pytest.approx([1.4 / 3, (0.28 + 0.2 + 0.54) / 3], abs=1e-6)
    assert figures.mean_survival_ece == pytest.approx(fmean([1.4 / 3, 1.02 / 3]), abs=1e-6)


def test_no_rounds_give_no_figures() -> None:
    acceptance = acceptance_figures(RoundTable.of([], 3, confidence=False))
    assert (acceptance.length, acceptance.rate, acceptance.conditional) == (None, None, [None] * 3)
    assert confidence_figures(RoundTable.of([], 3, confidence=True), np.ones(3)).mean_ece is None


def test_a_figure_that_a_dataset_lacks_does_not_count(run: Run, golden_bundle: GoldenBundle, prompts: Path) -> None:
    arguments = ["--max-new-tokens", "20", "--samples", "2", "--json"]
    out = run("evaluate", golden_bundle("dspark_vanilla"), "--input", prompts, *arguments).out
    one = Evaluation.model_validate_json(out).pooled.figures
    lacking = one.model_copy(
        update={"acceptance": acceptance_figures(RoundTable.of([], 5, confidence=False)), "confidence": one.confidence}
    )
    average = macro_average([one, lacking])
    assert average.acceptance == one.acceptance
    assert average.speed.speedup == pytest.approx(one.speed.speedup)


# --- output ---


def test_tables(run: Run, golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    files = dataset_files(tmp_path, "dspark_vanilla")
    arguments = ["evaluate", golden_bundle("dspark_vanilla"), "--input", files[0], "--input", files[1]]
    result = run(*arguments)
    assert (result.code, result.error) == (0, "")
    for text in ("first", "last", "macro average", "ROC-AUC", "survival ECE, raw", "acceptance length", "0.95"):
        assert text in result.out
    expected = recounted(
        [pair for index in DATASETS["first"] for pair in reference_rounds("dspark_vanilla", "greedy", index)]
    )
    assert f"{expected['accepted']} of {expected['verified']}" in result.out
    alone = run("evaluate", golden_bundle("eagle3"), "--input", files[0], "--max-new-tokens", "9").out
    assert "macro average" not in alone
    assert "ROC-AUC" not in alone


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


# --- refusals ---


def test_matplotlib_is_asked_for_before_any_work(
    run: Run, golden_bundle: GoldenBundle, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(Bundle, "open", lambda *_, **__: pytest.fail("work was begun"))
    arguments = ["evaluate", golden_bundle("eagle3"), "--input", prompts]
    result = run(*arguments, "--report", tmp_path / "report")
    assert (result.code, result.out) == (1, "")
    assert result.error == "error: --report needs matplotlib: pip install 'dspark-onnx[report]'\n"
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("qwen3_target", [], "has no drafter, so there is nothing to evaluate"),
        ("eagle3", ["--scheduler", "off"], "scheduler 'off' does not draft"),
        ("eagle3", ["--scheduler", "threshold"], "scheduler 'threshold' needs a confidence head"),
        ("eagle3", ["--max-draft-tokens", "6"], "max_draft_tokens is 6; this drafter allows 1 to 5"),
        ("eagle3", ["--max-new-tokens", "2"], "max_new_tokens is 2; to draft at all takes 3"),
        ("eagle3", ["--max-new-tokens", "600"], "prompts, row 0: the prompt's 24 tokens and max_new_tokens 600"),
        ("eagle3", ["--samples", "0"], "samples is 0; it must be at least 1"),
        ("eagle3", ["--seed", "-1"], "seed = -1: must be greater than or equal to 0"),
        ("eagle3", ["--temperature", "-1"], "temperature = -1.0: must be greater than or equal to 0"),
        ("eagle3", ["--batch-size", "0"], "batch_size is 0; it must be from 1 to"),
        ("eagle3", ["--threads", "9999"], "threads is 9999"),
        ("eagle3", ["--input", "/no/such/file.jsonl"], "/no/such/file.jsonl: cannot be read"),
        ("eagle3", ["/no/such/file.jsonl"], "/no/such/file.jsonl: cannot be read"),
        ("eagle3", ["--input", "sub/prompts.jsonl"], "there is another file named 'prompts'; a file's name is its"),
        ("eagle3", ["--input", "empty.jsonl"], "empty.jsonl: has no rows"),
        ("eagle3", ["--input", "damaged.jsonl"], "damaged.jsonl: line 2 is not JSON"),
        ("eagle3", ["--input", "wrong.jsonl"], "wrong, row 1: a row must have exactly one of prompt"),
        ("eagle3", ["--report", "empty.jsonl"], "--report empty.jsonl: "),
        ("eagle3", ["--report", "empty.jsonl/report"], "empty.jsonl is no folder that can be written"),
    ],
)
def test_evaluate_refuses(
    name: str,
    arguments: list[str],
    message: str,
    run: Run,
    golden_bundle: GoldenBundle,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--report" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    shutil.copy(prompts, tmp_path / "sub")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "damaged.jsonl").write_text('{"prompt": "x"}\n{')
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "x"}\n{"text": "x"}')
    before = sorted(tmp_path.rglob("*"))
    result = run("evaluate", golden_bundle(name), "--input", prompts, *arguments)
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith("error: ")
    assert message in result.error
    assert result.error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_calibration_is_refused(run: Run, golden_bundle: GoldenBundle, prompts: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(golden_bundle("dspark_vanilla"), tmp_path / "bundle"))
    (bundle / CALIBRATION).write_text("{")
    result = run("evaluate", bundle, "--input", prompts)
    assert (result.code, result.out) == (1, "")
    assert "calibration.json: the file: Invalid JSON" in result.error


def test_evaluate_does_not_touch_the_bundle(run: Run, golden_bundle: GoldenBundle, prompts: Path) -> None:
    bundle = golden_bundle("dspark_vanilla")
    before = {file.name: file.stat().st_mtime_ns for file in bundle.iterdir()}
    assert run("evaluate", bundle, "--input", prompts, "--samples", "1", "--max-new-tokens", "5").code == 0
    assert {file.name: file.stat().st_mtime_ns for file in bundle.iterdir()} == before


def test_speculation_is_as_in_generation(run: Run, golden_bundle: GoldenBundle, prompts: Path) -> None:
    bundle = golden_bundle("dspark_vanilla")
    arguments = ["--max-draft-tokens", "2", "--max-new-tokens", "30", "--json"]
    counts = json.loads(run("evaluate", bundle, "--input", prompts, *arguments).out)["pooled"]["counts"]
    model = load(bundle, options=SpeculationOptions("fixed", max_draft_tokens=2))
    stats = [each.stats for each in model.generate(PROMPTS, SamplingParams(max_new_tokens=30))]
    assert counts["verified"] == sum(sum(each.draft_lengths) for each in stats)
    assert counts["reached"][2:] == [0, 0, 0]
