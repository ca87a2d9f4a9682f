"""What a manifest can refuse is refused before any graph is loaded, in every command."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.exporter.export import Static, export_bundle, prepare
from dspark.providers import OnnxRuntimeProvider
from dspark.runtime.bundle.manifest import MANIFEST
from tests.conftest import GOLDEN
from tests.runtime.commands.support import GoldenBundle, jsonl
from tests.support.command_line import Result, Run
from tests.support.costs import write_flat_costs

ROWS = jsonl({"prompt": "tead "})
MEASURING: dict[str, list[str]] = {
    "bench": ["--input", "-"],
    "bench --profile-graph": ["--input", "-"],
    "bench --load": ["--input", "-", "--concurrency", "1"],
    "evaluate": ["--input", "rows.jsonl"],
    "calibrate": ["--input", "rows.jsonl"],
    "compare": ["--input", "rows.jsonl", "--reference", "BUNDLE"],
}
GENERATING: dict[str, list[str]] = {"generate": ["--prompt", "tead "], "chat": []}
COMMANDS = {**GENERATING, **MEASURING}

BATCH = 2


@pytest.fixture(scope="module")
def fixed_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of fixed shapes, for two requests."""
    path = tmp_path_factory.mktemp("fixed") / "bundle"
    static = Static(BATCH, 16, (64, 128, 512))
    export_bundle(prepare(GOLDEN / "qwen3_target", GOLDEN / "dspark_vanilla", path, cache_form="delta", static=static))
    return path


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every attempt to load a graph fail the test."""
    for method in ("open", "profile"):
        monkeypatch.setattr(OnnxRuntimeProvider, method, lambda *_, **__: pytest.fail("a graph was loaded"))


@pytest.fixture
def call(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs one of ``COMMANDS`` on a bundle, with further arguments."""
    (tmp_path / "rows.jsonl").write_text(ROWS)
    monkeypatch.chdir(tmp_path)

    def called(name: str, bundle: Path, *arguments: str) -> Result:
        command, *flags = name.split()
        common = [str(bundle) if each == "BUNDLE" else each for each in COMMANDS[name]]
        return run(command, bundle, *flags, *common, *arguments, stdin=ROWS)

    return called


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize("name", COMMANDS)
def test_more_tokens_than_the_context_are_refused(
    name: str, call: Callable[..., Result], chat_bundle: GoldenBundle
) -> None:
    bundle = chat_bundle("dspark_vanilla")
    result = call(name, bundle, "--max-new-tokens", "512")
    message = "max_new_tokens is 512; the limit is 512 with the prompt, which has at least 1"
    assert result == Result(1, "", f"error: {bundle}: {message}\n")


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize("name", ["generate", "chat", "bench", "bench --load"])
@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("max_sequence_len: 40", "max_new_tokens is 50; the limit is 40 with the prompt, which has at least 1"),
        ("scheduling: {max_cache_tokens: 50}", "max_new_tokens is 50; the cache has room for 50 (max_cache_tokens)"),
    ],
)
def test_a_profile_may_allow_less(
    profile: str, message: str, name: str, call: Callable[..., Result], chat_bundle: GoldenBundle, tmp_path: Path
) -> None:
    (tmp_path / "profile.yaml").write_text(profile)
    result = call(name, chat_bundle("dspark_vanilla"), "--max-new-tokens", "50", "--profile", "profile.yaml")
    assert (result.code, result.out) == (1, "")
    assert message in result.error


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize("name", ["generate", "chat", "bench", "bench --profile-graph", "evaluate"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-draft-tokens", "6", "max_draft_tokens is 6; this drafter allows 1 to 5"),
        ("--confidence-threshold", "1.5", "confidence_threshold is 1.5; it is a probability from 0 to 1"),
    ],
)
def test_options_of_speculation(
    option: str, value: str, message: str, name: str, call: Callable[..., Result], chat_bundle: GoldenBundle
) -> None:
    bundle = chat_bundle("dspark_vanilla")
    result = call(name, bundle, "--max-new-tokens", "9", option, value)
    assert result == Result(1, "", f"error: {bundle}: {message}\n")


@pytest.mark.usefixtures("unloadable")
def test_what_needs_a_tokenizer_or_a_template(call: Callable[..., Result], vanilla: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(vanilla, tmp_path / "bundle"))
    manifest = json.loads((bundle / MANIFEST).read_text())
    del manifest["files"][manifest["text"]["tokenizer"]]
    manifest["text"]["tokenizer"] = None
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    for name, arguments, message in (
        ("generate", [], "has no tokenizer, so there is no text to print; add --json to print token ids"),
        ("generate", ["--json"], "has no tokenizer, which --prompt needs; give token ids with --input"),
        ("generate", ["--stop", "x"], "stop strings need a tokenizer, and this bundle has none"),
        ("chat", [], "has no chat template, which a conversation needs; use generate"),
    ):
        assert call(name, bundle, *arguments).error == f"error: {bundle}: {message}\n"


def test_a_row_may_have_a_limit_of_its_own(run: Run, vanilla: Path) -> None:
    """Then the option is not what its request is made with."""
    rows = jsonl({"prompt": "tead ", "max_new_tokens": 6}, {"prompt": "tead "})
    result = run("generate", vanilla, "--input", "-", "--max-new-tokens", "600", stdin=rows)
    assert (result.code, result.out) == (0, "in the\n\n")
    assert "row 1: the prompt's 5 tokens and max_new_tokens 600 make 605; the limit is 512" in result.error


# --- the batch of fixed shapes ---


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize("name", ["generate", "evaluate", "calibrate"])
def test_a_larger_batch_than_fixed_shapes_are_for(name: str, call: Callable[..., Result], fixed_bundle: Path) -> None:
    result = call(name, fixed_bundle, "--batch-size", "3", "--max-new-tokens", "9")
    assert (result.code, result.out) == (1, "")
    assert "batch_size is 3; it must be from 1 to 2, which the bundle's fixed shapes are for" in result.error


def test_calibrate_takes_as_many_as_fixed_shapes_are_for(
    call: Callable[..., Result], fixed_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def noted(bundle: object, datasets: object, temperatures: object, tokens: object, size: int, *_: object) -> None:
        sizes.append(size)
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark.runtime.evaluation.calibrator.run_calibration", noted)
    for arguments in ([], ["--batch-size", "1"]):
        assert call("calibrate", fixed_bundle, "--max-new-tokens", "9", *arguments).code == 130
    assert sizes == [BATCH, 1]


# --- schedulers ---


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize("name", ["generate", "chat", "bench", "evaluate"])
@pytest.mark.parametrize("scheduler", ["hardware", "hardware-async", "threshold", "fixed"])
def test_a_scheduler_without_a_drafter_names_the_bundle_and_what_always_works(
    scheduler: str, name: str, call: Callable[..., Result], chat_bundle: GoldenBundle
) -> None:
    bundle = chat_bundle("qwen3_target")
    result = call(name, bundle, "--scheduler", scheduler, "--max-new-tokens", "9")
    assert result.error == (
        f"error: {bundle}: scheduler '{scheduler}' needs a drafter, and this bundle has none; leave the scheduler "
        "(--scheduler) out, which works with every bundle\n"
    )


@pytest.mark.parametrize("name", ["qwen3_target", "dspark_vanilla", "dspark_gated", "dflash", "eagle3"])
@pytest.mark.parametrize("fixed", [False, True])
def test_no_scheduler_works_with_every_bundle(
    name: str, fixed: bool, run: Run, golden_bundle: GoldenBundle, tmp_path: Path
) -> None:
    bundle = golden_bundle(name)
    if fixed:
        target, drafter = (
            (GOLDEN / name, None) if name.endswith("_target") else (GOLDEN / "qwen3_target", GOLDEN / name)
        )
        bundle = tmp_path / "bundle"
        export_bundle(prepare(target, drafter, bundle, cache_form="delta", static=Static(1, 16, (64, 128))))
    else:
        write_flat_costs(bundle)
    common = ["--max-new-tokens", "6"]
    assert run("generate", bundle, "--prompt", "tead ", *common) == Result(0, "in the\n", "")
    for profile in ("flash", "pro"):
        result = run("generate", bundle, "--prompt", "tead ", "--profile", profile, *common)
        assert (result.code, result.out) == (0, "in the\n")
    assert run("bench", bundle, "--input", "-", "--max-new-tokens", "24", stdin=ROWS).code == 0


# --- providers ---


@pytest.mark.parametrize("name", [*(name for name in COMMANDS if name != "calibrate"), "inspect", "profile"])
def test_a_provider_for_a_graph_that_is_not_there(
    name: str, run: Run, call: Callable[..., Result], chat_bundle: GoldenBundle
) -> None:
    bundle = chat_bundle("eagle3")
    provider = ("--provider", "head=cpu")
    if name == "inspect":
        result = run("inspect", bundle, "--placement", *provider)
    elif name == "profile":
        result = run("profile", bundle, *provider)
    else:
        result = call(name, bundle, "--max-new-tokens", "9", *provider)
    assert (result.code, result.out) == (1, "")
    assert "the provider for head would run nothing; this bundle's graphs are target, drafter\n" in result.error


@pytest.mark.parametrize("name", ["generate", "bench", "bench --load"])
def test_neither_is_it_ignored_where_nothing_drafts(
    name: str, call: Callable[..., Result], golden_bundle: GoldenBundle
) -> None:
    off = ["--schedulers", "off"] if "--load" in name else ["--scheduler", "off"]
    for bundle in ("qwen3_target", "eagle3"):
        result = call(name, golden_bundle(bundle), "--max-new-tokens", "9", *off, "--provider", "head=cpu")
        assert "the provider for head would run nothing" in result.error
