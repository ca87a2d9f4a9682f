"""Compiling ahead of time: what the command does with engines and compiled models, over fakes of the libraries."""

import re
import sys
from pathlib import Path

import onnx_ir as ir
import pytest

from dspark.exporter.compile import Compilation
from dspark.exporter.export import Static, export_bundle, prepare
from dspark.exporter.precision import Precision, PrecisionProfile
from dspark.providers import Choice, CompileOptions, ProviderError, SessionLimits, find_provider
from dspark.providers.engine_key import EngineKey
from dspark.runtime import Bundle
from dspark.runtime.commands.provider_report import engine_rows
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.model.fixed_shapes import graph_dimensions
from tests.conftest import GOLDEN
from tests.exporter.test_cli import run
from tests.support import fake_cuda, fake_onnxruntime, fake_tensorrt
from tests.support.command_line import runner
from tests.support.fake_onnxruntime import MINE, FakeDevice
from tests.support.fake_tensorrt import FakeTensorRt


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
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: --compile tensorrt: ")
    assert error.endswith("target.onnx: tensorrt cannot build the engine: no kernel\n")
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
    open_sessions(
        opened, HostOptions.parse("qnn:soc_model=60", threads=1), list(opened.manifest.precision), check_hashes=True
    )
    assert {file.parent for file in runtime.loaded} == {moved / "engines" / "qnn"}
    with pytest.raises(ProviderError, match=r"soc_model=60', but here it is 'backend_type=htp, soc_model=61'"):
        open_sessions(opened, HostOptions.parse("qnn:soc_model=61", threads=1), ["head"], check_hashes=None)


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


def test_an_execution_provider_of_another_package_compiles_without_a_change_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_onnxruntime.install(monkeypatch, built_in=("MineExecutionProvider",))
    monkeypatch.setattr("dspark.providers.registry.added_providers", lambda: {"mine": MINE})
    output = tmp_path / "bundle"
    arguments = ("--output", output, "--precision", "fp16", "--compile", "mine:chip=9")
    assert run(monkeypatch, GOLDEN / "qwen3_target", *arguments) == 0
    assert EngineKey.read(output / "engines" / "mine" / "target.json").device == "chip=9"


# --- through a runtime of another package ---

OTHER_RUNTIME = """
from dataclasses import dataclass, field
from dspark.providers import DEFAULT_LOADING, Provider, ProviderError

@dataclass(frozen=True, kw_only=True)
class OtherProvider(Provider):
    asked: dict = field(default_factory=dict)

    def open(self, model, how=DEFAULT_LOADING):
        raise ProviderError("only compiles")

    def require_compiler(self, options=()):
        self.check_options(options)

    def compile(self, model, how):
        how.on_phase("tiling")
        self.asked[model.stem] = how
        folder = model.parent / "engines" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{model.stem}.bin").write_bytes(how.content or model.read_bytes())
        return f"speed {how.options['speed']}"

OTHER = OtherProvider(
    name="other",
    precisions=frozenset({"fp32", "fp16"}),
    options=frozenset({"speed"}),
    compiled_tables=frozenset({"fp16"}),
    compiles_ranges=True,
    compiles_fixed_cache=True,
)
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs a package whose provider has nothing of ONNX Runtime; returns a folder for bundles."""
    site = tmp_path / "site"
    info = site / "other-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "other_runtime.py").write_text(OTHER_RUNTIME)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dspark.providers]\nother = other_runtime:OTHER\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "other_runtime", raising=False)
    (tmp_path / "bundles").mkdir()
    return tmp_path / "bundles"


def test_a_runtime_of_another_package_compiles_without_a_change_here(
    other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked for each graph with the limits that the command line set."""
    output = other / "bundle"
    export = (GOLDEN / "qwen3_target", "--drafter", GOLDEN / "dspark_gated", "--output", output, "--precision", "fp16")
    limits = ("--batch-size", 3, "--max-sequence-length", 100)
    assert run(monkeypatch, *export, "--compile", "other:speed=2", *limits) == 0
    provider = find_provider("other")
    asked: dict[str, CompileOptions] = provider.asked  # type: ignore[attr-defined]
    assert list(asked) == ["target", "drafter", "head"]
    assert {(how.precision, how.draft_tokens, tuple(how.options.items())) for how in asked.values()} == {
        ("fp16", 5, (("speed", "2"),))
    }
    capacity = 128  # 105 rows, in steps of 64
    assert asked["target"].limits == SessionLimits(3, 128, 6, capacity, fixed_cache=True)
    for name in ("drafter", "head"):
        assert asked[name].limits == SessionLimits(3, 256, 256, capacity)
        assert asked[name].content is None
    assert not any(how.shapes for how in asked.values())
    built = output / "engines" / "other"
    assert {file.name for file in built.iterdir()} == {"target.bin", "drafter.bin", "head.bin"}
    assert (built / "head.bin").read_bytes() == (output / "head.onnx").read_bytes()
    fixed, free = ir.load(built / "target.bin", format="protobuf"), ir.load(output / "target.onnx")
    (cache,) = (value for value in fixed.graph.inputs if value.name == "past.0.key")
    assert cache.shape is not None
    assert cache.shape[2] == capacity
    sizes = [[str(size) for value in each.graph.inputs for size in value.shape or ()] for each in (fixed, free)]
    assert sizes[0] == [str(capacity) if size == "S" else size for size in sizes[1]]
    told = [line.partition(",")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("Compiled ")]
    assert told == [f"Compiled {graph} for speed 2" for graph in asked]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--precision", "int4"), "other does not compile int4; choose one of fp16, fp32"),
        (("--precision", "fp32"), "other cannot look tokens up in fp32 tables; add --table-precision fp16"),
        (("--precision", "fp16", "--max-sequence-length", 9999), "--max-sequence-length is 9999; the model's limit is"),
    ],
)
def test_what_it_does_not_compile_is_refused_before_anything_is_written(
    arguments: tuple[object, ...],
    message: str,
    other: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export = (GOLDEN / "qwen3_target", "--output", other / "bundle", "--compile", "other:speed=2", *arguments)
    assert run(monkeypatch, *export) == 1
    assert message in capsys.readouterr().err
    assert not list(other.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compile", "tensort"), "^error: --compile tensort: Unknown provider 'tensort'; .*Did you mean 'tensorrt'"),
        (
            ("--compile", "cpu"),
            "^error: --compile cpu: cpu runs graphs kernel by kernel and compiles nothing ahead of time",
        ),
        (("--compile", "qnn:soc=57"), "^error: --compile qnn:soc=57: qnn has no option 'soc'"),
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
        (("--compile", "cpu:a:"), "^error: --compile cpu:a:: cpu:a:: 'a:' is no option"),
        (("--compile", "head=qnn"), "^error: --compile head=qnn: Unknown provider 'head=qnn'"),
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
