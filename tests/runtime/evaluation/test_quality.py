"""``dspark-run compare``: its figures against float64 models that share nothing with the runtime."""

import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.numpy import load_file, save_file
from scipy.special import log_softmax
from scipy.stats import entropy

from dspark.exporter.export import export_bundle, prepare
from dspark.runtime import SamplingParams
from dspark.runtime.bundle.hashing import hash_file
from dspark.runtime.bundle.manifest import MANIFEST
from dspark.runtime.evaluation.quality_figures import Comparison, PositionScores, quality_figures, score_positions
from dspark.runtime.evaluation.tables import comparison_tables
from dspark.runtime.loading import loaded
from dspark.runtime.reports.tables import show_tables
from tests.reference import ReferenceTarget
from tests.support.command_line import Result, Run
from tests.support.golden_models import GOLDEN, PROMPTS, load
from tests.support.table_cells import table_cells

GoldenBundle = Callable[[str], Path]
Compare = Callable[..., Result]
Text = tuple[list[int], int]
"""Token ids, and how many of them are the prompt."""
DATASETS = {"first": [0, 1, 2], "last": [3, 4]}


@pytest.fixture
def compare(run: Run) -> Compare:
    return lambda candidate, reference, *arguments, **options: run(
        "compare", candidate, "--threads", "1", "--reference", reference, *arguments, **options
    )


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{dataset}.jsonl" for dataset in DATASETS]
    for path, indices in zip(paths, DATASETS.values(), strict=True):
        path.write_text("".join(json.dumps({"prompt_ids": PROMPTS[index]}) + "\n" for index in indices))
    return paths


def altered_target(folder: Path, alter: Callable[[str, Any], Any]) -> Path:
    """A copy of the golden Qwen3 target with other weights."""
    shutil.copytree(GOLDEN / "qwen3_target", folder)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: np.asarray(alter(name, tensor)).astype(tensor.dtype) for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose weights are off by some percent."""
    random = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("perturbed") / "perturbed"
    return altered_target(folder, lambda _, tensor: tensor * random.normal(1, 0.1, tensor.shape))


def exported(target: Path, output: Path, drafter: Path | None = None) -> Path:
    export_bundle(prepare(target, drafter, output))
    return output


def recomputed(reference: ReferenceTarget, candidate: ReferenceTarget, texts: Sequence[Text]) -> dict[str, Any]:
    """The figures from their definitions; every text is one pass without a cache."""
    losses: dict[str, list[float]] = {"reference": [], "candidate": []}
    agrees, divergences = [], []
    for tokens, prompt_length in texts:
        models = {"reference": reference, "candidate": candidate}
        logits = {side: model.forward(tokens, prefill=prompt_length)[0] for side, model in models.items()}
        predicted = {side: log_softmax(values, axis=1) for side, values in logits.items()}
        for position, token in enumerate(tokens[1:]):
            for side, values in predicted.items():
                losses[side].append(-values[position, token])
            right, judged = predicted["reference"][position], predicted["candidate"][position]
            agrees.append(right.argmax() == judged.argmax())
            divergences.append(entropy(np.exp(right), np.exp(judged)))
    perplexity = {side: np.exp(np.mean(values)) for side, values in losses.items()}
    return {
        "positions": len(agrees),
        "perplexity": perplexity,
        "perplexity_change": perplexity["candidate"] / perplexity["reference"] - 1,
        "top1_agreement": np.mean(agrees),
        "mean_kl": np.mean(divergences),
        "worst_kl": np.max(divergences),
    }


def assert_figures(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("candidate", ["perturbed", "llama_target"])
def test_figures_are_those_of_independent_models(
    candidate: str,
    compare: Compare,
    golden_bundle: GoldenBundle,
    perturbed: Path,
    files: Sequence[Path],
    tmp_path: Path,
) -> None:
    """The text is prompt and golden continuation; it is longer than what is computed at once and the cache's step."""
    folder = perturbed if candidate == "perturbed" else GOLDEN / candidate
    bundle, arguments = exported(folder, tmp_path / "candidate"), ["--max-new-tokens", "64", "--json"]
    result = compare(bundle, golden_bundle("qwen3_target"), "--input", *files, *arguments)
    assert (result.code, result.error) == (0, "")
    found = json.loads(result.out)
    models = ReferenceTarget(GOLDEN / "qwen3_target"), ReferenceTarget(folder)
    golden = json.loads((GOLDEN / "qwen3_target" / "golden.json").read_text())["greedy"]
    texts = [(case["prompt"] + case["output"], len(case["prompt"])) for case in golden]
    assert max(len(tokens) for tokens, _ in texts) > 65
    assert list(found["datasets"]) == list(DATASETS)
    for dataset, indices in DATASETS.items():
        assert found["datasets"][dataset]["prompts"] == len(indices)
        expected = recomputed(*models, [texts[index] for index in indices])
        assert_figures(found["datasets"][dataset]["quality"], expected)
    expected = recomputed(*models, texts)
    assert_figures(found["pooled"]["quality"], expected)
    assert 0.01 < expected["mean_kl"] < expected["worst_kl"]
    assert 0 < expected["top1_agreement"] < 1
    assert abs(expected["perplexity_change"]) > 0.01
    assert found["pooled"]["acceptance"] == {}
    assert (found["reference"]["bundle"], found["candidate"]["bundle"]) == ("qwen3_target", "candidate")


def test_the_text_is_what_the_reference_generates(
    compare: Compare, golden_bundle: GoldenBundle, perturbed: Path, files: Sequence[Path], tmp_path: Path
) -> None:
    """Sampled, with its drafter, each prompt with the next seed; a row's own options count."""
    bundle, samples = golden_bundle("dspark_vanilla"), 2
    rows = [json.loads(row) for file in files for row in file.read_text().splitlines()[:samples]]
    rows[-1]["temperature"] = 0.0
    files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows[samples:]))
    arguments = ["--max-new-tokens", "30", "--temperature", "0.9", "--seed", "5", "--samples", f"{samples}", "--json"]
    result = compare(exported(perturbed, tmp_path / "candidate"), bundle, "--input", *files, *arguments)
    assert (result.code, result.error) == (0, "")
    params = [
        SamplingParams(max_new_tokens=30, temperature=row.get("temperature", 0.9), seed=5 + index)
        for index, row in enumerate(rows)
    ]
    prompts = [row["prompt_ids"] for row in rows]
    done = load(bundle).generate(prompts, params)
    texts = [(prompt + each.token_ids, len(prompt)) for prompt, each in zip(prompts, done, strict=True)]
    expected = recomputed(ReferenceTarget(GOLDEN / "qwen3_target"), ReferenceTarget(perturbed), texts)
    found = json.loads(result.out)["pooled"]
    assert found["prompts"] == 2 * samples
    assert_figures(found["quality"], expected)
    assert found["rounds"] == {"reference": sum(sum(n > 0 for n in each.stats.draft_lengths) for each in done)}


def test_a_bundle_is_like_itself(compare: Compare, golden_bundle: GoldenBundle, files: Sequence[Path]) -> None:
    bundle = golden_bundle("dspark_vanilla")
    pooled = json.loads(compare(bundle, bundle, "--input", *files, "--json").out)["pooled"]
    figures = pooled["quality"]
    assert figures["perplexity"]["candidate"] == figures["perplexity"]["reference"] > 1
    assert (figures["perplexity_change"], figures["top1_agreement"]) == (0, 1)
    assert (figures["mean_kl"], figures["worst_kl"]) == (0, 0)
    assert pooled["acceptance"]["candidate"] == pooled["acceptance"]["reference"]
    assert pooled["rounds"]["candidate"] == pooled["rounds"]["reference"] > 0


def test_acceptance_is_what_evaluate_measures(
    run: Run, compare: Compare, golden_bundle: GoldenBundle, files: Sequence[Path]
) -> None:
    sides = {"reference": golden_bundle("dspark_vanilla"), "candidate": golden_bundle("eagle3")}
    arguments = ["--input", *files, "--max-new-tokens", "40", "--json"]
    compared = json.loads(compare(sides["candidate"], sides["reference"], *arguments).out)
    assert compared["datasets"].keys() == DATASETS.keys()
    for side, bundle in sides.items():
        evaluation = json.loads(run("evaluate", bundle, *arguments).out)
        for name in DATASETS:
            expected, found = evaluation["datasets"][name], compared["datasets"][name]
            assert found["acceptance"][side] == expected["figures"]["acceptance"]
            assert found["rounds"][side] == expected["counts"]["rounds"]
        assert compared["pooled"]["acceptance"][side] == evaluation["pooled"]["figures"]["acceptance"]
        assert compared[side]["drafter"]["name"] == bundle.name
    assert compared["pooled"]["quality"]["worst_kl"] < 1e-6  # another drafter is no other target


def test_the_tables(compare: Compare, golden_bundle: GoldenBundle, files: Sequence[Path]) -> None:
    arguments = ["--input", *files, "--max-new-tokens", "20"]
    sides = golden_bundle("qwen3_target"), golden_bundle("dflash")
    comparison = Comparison.model_validate_json(compare(*sides, *arguments, "--json").out)
    likeness, acceptance = comparison_tables(comparison)
    assert [row[0] for row in likeness.rows] == [row[0] for row in acceptance.rows] == [*DATASETS, "all"]
    assert likeness.rows[-1][1] == f"{comparison.pooled.quality.positions}"
    length = comparison.pooled.acceptance["reference"].length
    assert acceptance.rows[-1] == ["all", "–", f"{length:.2f}"]
    shown = compare(*sides, *arguments).out
    for cell in (
        "qwen3_target against dflash (KL in nats)",
        *likeness.columns,
        *likeness.rows[-1],
        *acceptance.rows[0],
    ):
        assert cell in shown
    assert len(comparison_tables(comparison.model_copy(update={"datasets": {"one": comparison.pooled}}))[0].rows) == 1


def test_the_tables_fit_a_terminal() -> None:
    count = 12_345
    scores = PositionScores(
        np.full(count, 3.0), np.full(count, 9.0), np.ones(count, np.bool_), np.full(count, 1.2345e-10)
    )
    summary = {"bundle": "SmolLM2-135M-Instruct", "target": "x", "drafter": None, "precision": {}}
    result = {"prompts": 1, "quality": quality_figures(scores).model_dump(), "rounds": {}, "acceptance": {}}
    settings = {"temperature": 0, "max_new_tokens": 1, "samples": None, "seed": 0, "threads": None}
    comparison = Comparison.model_validate(
        {"reference": summary, "candidate": summary, "settings": settings, "pooled": result}
        | {"datasets": {"arena-hard-v2": result, "gsm8k": result}}
    )
    (table,) = comparison_tables(comparison)
    assert table.rows[0][2:] == ["8103.084", "20.086", "+40242.88%", "100.00%", "1.23e-10", "1.23e-10"]
    screen = io.StringIO()
    show_tables([table], Console(file=screen, width=100))
    shown = [line.replace("│", " ").split() for line in screen.getvalue().splitlines() if "12,345" in line]
    assert shown == table.rows  # nothing is broken over lines or cut
    screen = io.StringIO()
    show_tables([table], Console(file=screen, width=80))
    assert max(map(len, screen.getvalue().splitlines())) <= 80
    assert table_cells(screen.getvalue()) == {
        (row[0], head): cell for row in table.rows for head, cell in zip(table.columns[1:], row[1:], strict=True)
    }


def test_compare_at_80_columns(compare: Compare, golden_bundle: GoldenBundle, files: Sequence[Path]) -> None:
    sides = (golden_bundle("eagle3"), golden_bundle("dflash"))
    arguments = ("--input", *files, "--max-new-tokens", "12")
    comparison = Comparison.model_validate_json(compare(*sides, *arguments, "--json").out)
    shown = compare(*sides, *arguments, columns=80).out
    assert max(map(len, shown.splitlines())) <= 80
    assert table_cells(shown) == {
        (row[0], head): cell
        for table in comparison_tables(comparison)
        for row in table.rows
        for head, cell in zip(table.columns[1:], row[1:], strict=True)
    }


# --- figures ---


@given(st.lists(st.lists(st.floats(-30, 30), min_size=8, max_size=8), min_size=1, max_size=5))
def test_scores_by_definition(rows: list[list[float]]) -> None:
    logits = np.array(rows)
    reference, candidate = log_softmax(logits[:, :4], axis=1), log_softmax(logits[:, 4:], axis=1)
    following = [index % 4 for index in range(len(rows))]
    scores = score_positions(reference, candidate, following)
    for index, token in enumerate(following):
        p, q = np.exp(reference[index]), np.exp(candidate[index])
        assert scores.reference_loss[index] == pytest.approx(-np.log(p[token]))
        assert scores.candidate_loss[index] == pytest.approx(-np.log(q[token]))
        assert scores.agrees[index] == (p.argmax() == q.argmax())
        assert scores.divergence[index] == pytest.approx(entropy(p, q), abs=1e-9)
        assert scores.divergence[index] >= 0
    assert score_positions(reference, reference, following).divergence.tolist() == [0] * len(rows)


def test_an_infinite_perplexity_survives_json() -> None:
    scores = PositionScores(np.array([1.0]), np.array([1e4]), np.array([False]), np.array([9.0]))
    figures = quality_figures(scores)
    assert figures.perplexity == {"reference": pytest.approx(np.e), "candidate": np.inf}
    assert type(figures).model_validate_json(figures.model_dump_json()) == figures


# --- refusals ---


def no_work(*_: object) -> None:
    pytest.fail("work was begun")


def edited(bundle: Path, output: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a bundle with another manifest."""
    shutil.copytree(bundle, output)
    manifest = json.loads((output / MANIFEST).read_text())
    edit(manifest)
    (output / MANIFEST).write_text(json.dumps(manifest))
    return output


def test_another_vocabulary_is_refused(
    compare: Compare,
    golden_bundle: GoldenBundle,
    files: Sequence[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded, "open_sessions", no_work)
    reference = golden_bundle("qwen3_target")
    other = edited(reference, tmp_path / "other", lambda manifest: manifest["target"].update(vocabulary_size=192))
    result = compare(other, reference, "--input", *files)
    assert (result.code, result.out) == (1, "")
    assert result.error == (
        f"error: {other}: has a vocabulary of 192 tokens, the reference {reference} one of 160; only bundles of "
        f"the same model can be compared\n"
    )


def test_another_tokenizer_is_refused(
    compare: Compare,
    golden_bundle: GoldenBundle,
    files: Sequence[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded, "open_sessions", no_work)
    reference, tokenizer = golden_bundle("qwen3_target"), tmp_path / "tokenizer.json"
    tokenizer.write_text((reference / "tokenizer.json").read_text().replace('"a"', '"å"'))
    info = {"bytes": tokenizer.stat().st_size, "sha256": hash_file(tokenizer)}
    other = edited(reference, tmp_path / "other", lambda manifest: manifest["files"].update({"tokenizer.json": info}))
    shutil.copy(tokenizer, other)
    without = edited(reference, tmp_path / "without", lambda manifest: manifest["text"].update(tokenizer=None))
    for candidate in (other, without):
        result = compare(candidate, reference, "--input", *files)
        assert (result.code, result.out) == (1, "")
        assert f"{candidate}: its tokenizer is not that of the reference {reference}" in result.error
        assert result.error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "0"], "samples is 0; it must be at least 1"),
        (["--seed", "-1"], "seed = -1: must be greater than or equal to 0"),
        (["--temperature", "-1"], "temperature = -1.0: must be greater than or equal to 0"),
        (["--max-new-tokens", "0"], "max_new_tokens = 0: must be greater than or equal to 1"),
        (
            ["--max-new-tokens", "90"],
            "first, row 0: the prompt's 24 tokens and max_new_tokens 90 make 114; the limit is",
        ),
        (["--max-new-tokens", "100"], "short: max_new_tokens is 100; the limit is 100 with the prompt"),
        (["--max-new-tokens", "9", "--threads", "9999"], "threads is 9999"),
        (["--input", "/no/such/file.jsonl"], "/no/such/file.jsonl: cannot be read"),
        (["--max-new-tokens", "9", "--reference", "/no/such/bundle"], "/no/such/bundle: no bundle here"),
    ],
)
def test_compare_refuses(
    arguments: list[str],
    message: str,
    compare: Compare,
    golden_bundle: GoldenBundle,
    files: Sequence[Path],
    tmp_path: Path,
) -> None:
    """The text must fit both bundles: the candidate's context is the shorter one."""
    reference = golden_bundle("qwen3_target")
    short = edited(reference, tmp_path / "short", lambda manifest: manifest["target"].update(context_length=100))
    result = compare(short, reference, "--input", *files, *arguments)
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith("error: ")
    assert message in result.error
    assert result.error.count("\n") == 1


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_values_that_are_not_finite_name_the_bundle(
    side: str, compare: Compare, golden_bundle: GoldenBundle, files: Sequence[Path], tmp_path: Path
) -> None:
    target = altered_target(
        tmp_path / "target", lambda name, tensor: tensor * (1e38 if name == "model.norm.weight" else 1)
    )
    broken = exported(target, tmp_path / "broken")
    bundles = (broken, golden_bundle("qwen3_target"))[:: 1 if side == "candidate" else -1]
    result = compare(*bundles, "--input", *files)
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith(f"error: {broken}: ")
    assert "not a finite number" in result.error
