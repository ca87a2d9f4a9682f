"""``dspark-run bench``; under load it is tested in ``test_bench_load.py``."""

import json
import shutil
from pathlib import Path

import pytest

from tests.runtime.commands.support import GoldenBundle, jsonl
from tests.support.command_line import Run
from tests.support.golden_models import PROMPTS


@pytest.mark.parametrize("name", ["qwen3_target", "dspark_vanilla", "eagle3"])
def test_bench(name: str, run: Run, golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(jsonl({"prompt_ids": PROMPTS[0]}, {"prompt": "tead "}))
    arguments = ["bench", golden_bundle(name), "--input", prompts, "--max-new-tokens", "12"]
    report = json.loads(run(*arguments, "--repeats", "2", "--json").out)
    assert (report["identical_outputs"], report["prompts"]) == (4, 4)
    assert report["plain"]["acceptance_length"] == 1
    assert report["plain"]["drafting_share"] == 0
    phases = report["plain"]["milliseconds_per_round"]
    assert {"draft", "head", "verify", "schedule", "host", "total"} == set(phases)
    assert phases["draft"] == phases["head"] == 0
    assert phases["total"] > 0
    result = run(*arguments)
    assert result.code == 0
    assert "Plain decoding over the bare graph call" in result.out
    if name == "qwen3_target":
        assert report["speculative"] is None
        assert "Speed-up" not in result.out
    else:
        assert report["speculative"]["acceptance_length"] > 1
        assert 0 < report["speculative"]["drafting_share"] <= 1  # on a model this small drafts hardly pay
        assert report["speedup"] > 0
        assert report["possible_speedup"] > 0
        assert "Outputs identical with and without speculation: 2 of 2" in result.out


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_bench_names_the_most_expensive_operators(name: str, run: Run, golden_bundle: GoldenBundle) -> None:
    arguments = ["bench", golden_bundle(name), "--max-new-tokens", "6", "--profile-graph"]
    graphs = json.loads(run(*arguments, "--json").out)
    assert graphs.keys() == ({"target", "drafter"} if name == "eagle3" else {"target", "drafter", "head"})
    for operators in graphs.values():
        assert 1 < len(operators) <= 10
        shares = [each["share"] for each in operators]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1.0001
        assert len({(each["name"], each["operator"]) for each in operators}) == len(operators)
        assert all(each["runs"] > 0 and each["seconds"] > 0 for each in operators)
    down = [each for each in graphs["target"] if each["operator"] == "Gemm"]
    assert any("layers.*/mlp" in each["name"] for each in down)
    assert "Most expensive operators of the target graph" in run(*arguments).out


def test_bench_has_prompts_of_its_own(run: Run, vanilla: Path) -> None:
    result = run("bench", vanilla, "--max-new-tokens", "3", "--json")
    assert result.code == 0
    assert json.loads(result.out)["prompts"] > 1


def test_bench_refuses_a_bad_row(run: Run, vanilla: Path) -> None:
    for row, message in (("{", "not JSON"), ('{"prompt": ""}', "the prompt is empty")):
        result = run("bench", vanilla, "--input", "-", "--max-new-tokens", "3", stdin=row)
        assert result.code == 1
        assert message in result.error


def test_bench_refuses_what_generate_refuses(run: Run, vanilla: Path) -> None:
    for arguments, message in (
        (["--threads", "3000"], "threads is 3000"),
        (["--max-new-tokens", "1"], "max_new_tokens of at least 2"),
        (["--repeats", "0"], "repeats of at least 1"),
        (["--profile-graph", "--repeats", "2"], "--repeats does not go with --profile-graph"),
        (["--profile-graph", "--max-new-tokens", "0"], "max_new_tokens of at least 2; there are 4 prompts and 0"),
        (["--profile-graph", "--input", "/dev/null"], "needs prompts and max_new_tokens of at least 2; there are 0"),
    ):
        result = run("bench", vanilla, *arguments)
        assert result.code == 1
        assert message in result.error


def test_bench_refuses_an_altered_bundle(run: Run, vanilla: Path, tmp_path: Path) -> None:
    altered = Path(shutil.copytree(vanilla, tmp_path / "altered"))
    content = bytearray((altered / "weights.bin").read_bytes())
    content[-1] ^= 1
    (altered / "weights.bin").write_bytes(content)
    result = run("bench", altered, "--max-new-tokens", "3")
    assert result.code == 1
    assert "weights.bin: altered since export" in result.error
