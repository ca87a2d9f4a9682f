"""An evaluation's figures against a recount of the reference's rounds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from dspark.runtime import SamplingParams
from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.decoding.rounds import RoundTable
from dspark.runtime.evaluation.evaluator import Evaluation
from dspark.runtime.evaluation.figures import acceptance_figures, confidence_figures, macro_average, sweep_figures
from tests.support.calibration import calibrated
from tests.support.command_line import Run
from tests.support.golden_models import PROMPTS, load
from tests.support.reference_rounds import DATASETS, dataset_files, recounted, reference_rounds

GoldenBundle = Callable[[str], Path]


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


logits = st.floats(-4, 4, width=32)


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
