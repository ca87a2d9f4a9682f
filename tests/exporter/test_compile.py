"""Compiling ahead of time: what the command does with engines and compiled models, over fakes of the libraries."""

import re
import sys
from pathlib import Path

import onnx_ir as ir
import pytest

from dspark.exporter.compile import Compilation
from dspark.exporter.export import Static, export_bundle, prepare
from dspark.exporter.precision import Precision, PrecisionProfile
from dspark.providers import Choice, ProviderError, Selection, find_provider
from dspark.providers.engine_key import EngineKey
from dspark.runtime import Bundle
from dspark.runtime.commands.provider_report import engine_rows
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.model.fixed_shapes import graph_dimensions
from tests.conftest import GOLDEN
from tests.exporter.test_cli import run
from tests.providers import fake_cuda, fake_onnxruntime, fake_tensorrt
from tests.providers.fake_onnxruntime import FakeDevice
from tests.providers.fake_tensorrt import FakeTensorRt
from tests.providers.test_compiled_models import MINE
from tests.runtime.command_line import runner


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRt:
    return fake_tensorrt.install(monkeypatch, fake_cuda.install(monkeypatch))


def arguments(output: Path) -> tuple[object, ...]:
    drafter = GOLDEN / "dspark_gated"
    return (GOLDEN / "qwen3_target", "--drafter", drafter, "--output", output, "--compile", "tensorrt")


def test_every_graph_gets_an_engine(
    trt: FakeTensorRt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "bundle"
    assert run(monkeypatch, *arguments(output), "--batch-size", 3, "--max-sequence-length", 100) == 0
    engines = {file.name for file in (output / "engines" / "sm90").glob("*.engine")}
    assert engines == {"target.engine", "drafter.engine", "head.engine"}
    assert trt.profiles[0].shapes["past"] == ((1, 1), (1, 128), (3, 128))  # 112 tokens, in steps of 64
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Compiled ")]
    assert len(told) == 3
    assert "Compiled target for Fake GPU (sm90) with tensorrt 11.4.0: 3 layers, profiles draft, extension" in told[0]
    inspected = runner(monkeypatch, capsys)("inspect", output).out.partition("Compiled")[2]
    assert [inspected.count(f"│ {graph} ") for graph in ("target", "drafter", "head")] == [1, 1, 1]
    for text in ("tensorrt", "Fake GPU", "11.4.0", "draft: B 1–3, T", "S 1–128"):
        assert text in inspected


def test_a_graph_that_cannot_be_compiled_leaves_no_bundle(
    trt: FakeTensorRt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trt.build_problem = "no kernel"
    assert run(monkeypatch, *arguments(tmp_path / "bundle")) == 1
    assert capsys.readouterr().err.endswith("target.onnx: tensorrt cannot build the engine: no kernel\n")
    assert not list(tmp_path.iterdir())


def test_a_missing_compiler_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    export = prepare(GOLDEN / "qwen3_target", None, tmp_path / "outputs" / "bundle")
    with pytest.raises(ProviderError, match=r"tensorrt is not installed; pip install 'dspark-onnx\[tensorrt\]'$"):
        Compilation.of(Choice.parse("tensorrt"), export)
    assert not list(tmp_path.iterdir())


# --- through ONNX Runtime ---


def test_every_graph_is_compiled_in_every_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """QNN needs fixed shapes, which implies --static; then nothing of what was compiled is needed."""
    runtime = fake_onnxruntime.install(
        monkeypatch, find_provider("qnn"), libraries={"/vendor/plugin.so": [FakeDevice("QNNExecutionProvider")]}
    )
    output = tmp_path / "bundle"
    fixed = ("--static-chunk", 16, "--static-cache", 64, "--static-cache", 128)
    graphs = (GOLDEN / "qwen3_target", "--drafter", GOLDEN / "dspark_gated", "--output", output, "--precision", "fp16")
    assert run(monkeypatch, *graphs, "--compile", "qnn:soc_model=60", *fixed) == 0
    keys = [EngineKey.read(file) for file in (output / "engines" / "qnn").glob("*.json")]
    assert {key.device for key in keys} == {"backend_type=htp, soc_model=60"}
    shapes = [{symbol: most for symbol, (_, _, most) in key.profiles["fixed"].items()} for key in keys]
    bundle = Bundle.open(output)
    planned = [sizes for graph in bundle.manifest.precision for sizes in graph_dimensions(bundle.manifest, graph)]
    assert sorted(map(str, shapes)) == sorted(map(str, planned))
    found = engine_rows(bundle)
    assert [row["of"] for row in found] == ["target"] * 4 + ["drafter"] * 2 + ["head"]
    assert {(row["backend"], row["device"], row["version"]) for row in found} == {
        ("qnn", "backend_type=htp, soc_model=60", keys[0].version)
    }
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Compiled ")]
    assert [line.partition(": ")[2].partition(",")[0] for line in told] == ["4 shapes", "2 shapes", "1 shape"]
    for name in ("target.onnx", "drafter.onnx", "head.onnx", "weights.bin"):
        (output / name).unlink()
    runtime.loaded.clear()
    moved = output.rename(tmp_path / "moved")
    opened = Bundle.open(moved)
    open_sessions(opened, Selection.parse("qnn:soc_model=60"), list(opened.manifest.precision), 1, check_hashes=True)
    assert {file.parent for file in runtime.loaded} == {moved / "engines" / "qnn"}
    with pytest.raises(ProviderError, match=r"soc_model=60', but here it is 'backend_type=htp, soc_model=61'"):
        open_sessions(opened, Selection.parse("qnn:soc_model=61"), ["head"], 1, check_hashes=None)


def test_every_shape_is_told_and_an_interrupt_leaves_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qnn = find_provider("qnn")
    fake_onnxruntime.install(monkeypatch, qnn, libraries={"/vendor/plugin.so": [FakeDevice("QNNExecutionProvider")]})
    fp16 = PrecisionProfile.of(Precision.FP16)
    static = Static(1, 16, (64, 128))
    output = tmp_path / "bundle"
    export = prepare(GOLDEN / "qwen3_target", None, output, precision=fp16, cache_form="delta", static=static)
    phases: list[str] = []

    def tell(phase: str) -> None:
        phases.append(phase)
        if "3 of 4" in phase:
            raise KeyboardInterrupt

    compilation = Compilation.of(Choice.parse("qnn"), export)
    with pytest.raises(KeyboardInterrupt):
        export_bundle(export, compile_graphs=lambda folder, manifest: compilation.run(folder, manifest, tell))
    assert phases == [f"Compiling target: shape {number} of 4" for number in (1, 2, 3)]
    assert not list(tmp_path.iterdir())


def test_a_provider_of_another_package_compiles_without_a_change_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_onnxruntime.install(monkeypatch, built_in=("MineExecutionProvider",))
    monkeypatch.setattr("dspark.providers.registry.added_providers", lambda: {"mine": MINE})
    output = tmp_path / "bundle"
    arguments = ("--output", output, "--precision", "fp16", "--compile", "mine:chip=9")
    assert run(monkeypatch, GOLDEN / "qwen3_target", *arguments) == 0
    assert EngineKey.read(output / "engines" / "mine" / "target.json").device == "chip=9"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compile", "tensort"), "Unknown provider 'tensort'; .*Did you mean 'tensorrt'"),
        (("--compile", "cpu"), "cpu runs graphs kernel by kernel and compiles nothing ahead of time"),
        (("--compile", "qnn:soc=57"), "qnn has no option 'soc'"),
        (("--compile", "qnn", "--precision", "int8"), "qnn does not compile int8; choose one of fp16, fp32"),
        (("--compile", "qnn", "--batch-size", 3), "--batch-size has no effect without --compile tensorrt or"),
        (("--max-sequence-length", 9), "--max-sequence-length has no effect without --compile tensorrt or --compile"),
        (("--static-batch", 1), "--static-batch has no effect without --static$"),
        (("--static-chunk", 8), "--static-chunk has no effect without --static$"),
        (("--static-cache", 64), "--static-cache has no effect without --static$"),
        (("--static", "--cache-form", "in-place"), "--cache-form in-place is for devices .*; this export needs delta$"),
        (("--compile", "qnn", "--cache-form", "in-place"), "--cache-form in-place is for devices .* needs delta$"),
        (("--draft-precision", "int8"), "--draft-precision has no effect without --drafter$"),
        (("--block-size", 64), r"--block-size has no effect without a precision in blocks \(int4, int8-blocks\)$"),
        (("--precision", "int8", "--accuracy-level", 4), "--accuracy-level has no effect without a precision in bl"),
        (("--compile", "cpu:a:"), "cpu:a:: 'a:' is no option"),
    ],
)
def test_what_would_not_work_or_be_ignored_is_refused(
    arguments: tuple[object, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, GOLDEN / "qwen3_target", "--output", tmp_path / "bundle", *arguments) == 1
    assert re.search(message, capsys.readouterr().err.strip())
    assert not list(tmp_path.iterdir())


def test_a_graph_names_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's key holds the hash of the graph's file, which must tell other weights apart."""
    assert run(monkeypatch, GOLDEN / "qwen3_target", "--output", tmp_path / "bundle") == 0
    weights = Bundle.open(tmp_path / "bundle").manifest.files["weights.bin"]
    assert ir.load(tmp_path / "bundle" / "target.onnx").metadata_props == {"weights.bin": weights.sha256}
