"""Compiling ahead of time: what the command does with engines, over a fake TensorRT."""

import sys
from pathlib import Path

import onnx_ir as ir
import pytest

from dspark.exporter.compile import Compilation, Compiler
from dspark.exporter.export import prepare
from dspark.providers import ProviderError
from dspark.runtime import Bundle
from tests.conftest import GOLDEN
from tests.exporter.test_cli import run
from tests.providers import fake_cuda, fake_tensorrt
from tests.providers.fake_tensorrt import FakeTensorRt


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
    Bundle.open(output)


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
    with pytest.raises(ProviderError, match=r"pip install tensorrt$"):
        Compilation.of(Compiler.TENSORRT, export, 4, None)
    assert not list(tmp_path.iterdir())


def test_a_graph_names_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's key holds the hash of the graph's file, which must tell other weights apart."""
    assert run(monkeypatch, GOLDEN / "qwen3_target", "--output", tmp_path / "bundle") == 0
    weights = Bundle.open(tmp_path / "bundle").manifest.files["weights.bin"]
    assert ir.load(tmp_path / "bundle" / "target.onnx").metadata_props == {"weights.bin": weights.sha256}
