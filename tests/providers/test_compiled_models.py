"""Models compiled ahead of time through ONNX Runtime: what is asked for, what is loaded, and when it is refused."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dspark.providers import LoadOptions, OnnxRuntimeProvider, ProviderError, find_provider
from tests.providers import fake_onnxruntime
from tests.providers.fake_onnxruntime import FakeDevice, FakeOnnxRuntime

MINE = OnnxRuntimeProvider(
    name="mine",
    execution_provider="MineExecutionProvider",
    precisions=frozenset({"fp16"}),
    options=frozenset({"chip", "verbose"}),
    defaults=(("chip", "7"),),
    run_options=frozenset({"verbose"}),
)
"""A provider as a third party writes it."""
SIZES = {"B": 1, "S": 64, "S+T": 70}
Install = Callable[..., FakeOnnxRuntime]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    return partial(fake_onnxruntime.install, monkeypatch)


@pytest.fixture
def runtime(install: Install) -> FakeOnnxRuntime:
    return install(built_in=("MineExecutionProvider",))


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "target.onnx").write_bytes(b"graph")
    return tmp_path / "bundle" / "target.onnx"


def test_a_compiled_model_and_its_key_lie_in_the_providers_folder(runtime: FakeOnnxRuntime, graph: Path) -> None:
    MINE.compile(graph, "fp16", LoadOptions(options={"chip": "8"}, dimensions=SIZES))
    folder = graph.parent / "engines" / "mine"
    assert {file.name for file in folder.iterdir()} == {"target-B1-S64.onnx", "target-B1-S64.json"}
    assert json.loads((folder / "target-B1-S64.json").read_text()) == {
        "backend": "mine",
        "version": "onnxruntime 1.32.0",
        "device": "chip=8",
        "graph": hashlib.sha256(b"graph").hexdigest(),
        "precision": "fp16",
        "layers": None,
        "profiles": {"fixed": {"B": [1, 1, 1], "S": [64, 64, 64], "S+T": [70, 70, 70]}},
    }
    (compiling, providers), (loading, _) = runtime.sessions
    assert runtime.loaded == [graph, folder / "target-B1-S64.onnx"]  # it is tried out
    assert providers == [("MineExecutionProvider", {"chip": "8"})]
    assert compiling.dimensions == SIZES
    assert {name: compiling.config[name] for name in compiling.config if name.startswith("ep.")} == {
        "ep.context_enable": "1",
        "ep.context_file_path": str(folder / "target-B1-S64.onnx"),
        "ep.context_embed_mode": "0",
    }
    assert "ep.context_enable" not in loading.config
    for options in (compiling, loading):
        assert options.config["session.disable_cpu_ep_fallback"] == "1"


def test_it_runs_in_another_folder_without_its_graph(runtime: FakeOnnxRuntime, graph: Path, tmp_path: Path) -> None:
    MINE.compile(graph, "fp16", LoadOptions(dimensions=SIZES))
    graph.unlink()
    graph.parent.rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "target.onnx"
    for use in (MINE.open, MINE.profile, MINE.placement):
        use(moved, LoadOptions(options={"verbose": "1"}, dimensions=SIZES))  # what only matters now is free
        assert runtime.loaded[-1] == moved.parent / "engines" / "mine" / "target-B1-S64.onnx"
        assert not runtime.sessions[-1][0].dimensions


def test_without_a_compiled_model_the_graph_is_loaded(runtime: FakeOnnxRuntime, graph: Path) -> None:
    MINE.compile(graph, "fp16", LoadOptions(dimensions=SIZES))
    MINE.open(graph, LoadOptions(dimensions={"B": 1, "S": 128, "S+T": 134}))
    assert runtime.loaded[-1] == graph


@pytest.mark.parametrize(
    ("field", "there", "here"),
    [
        ("backend", "yours", "'mine'"),
        ("version", "onnxruntime 1.31.0", r"'onnxruntime 1\.32\.0'"),
        ("device", "chip=6", "'chip=7'"),
        ("profiles", {"fixed": {"B": [2, 2, 2]}}, r"\{'fixed': \{'B': \[1, 1, 1\], .*\}\}"),
    ],
)
def test_one_for_something_else_is_refused_with_both_values(
    field: str, there: object, here: str, runtime: FakeOnnxRuntime, graph: Path
) -> None:
    MINE.compile(graph, "fp16", LoadOptions(dimensions=SIZES))
    key = graph.parent / "engines" / "mine" / "target-B1-S64.json"
    key.write_text(json.dumps({**json.loads(key.read_text()), field: there}))
    with pytest.raises(ProviderError, match=rf"but here it is {here}; compile it with .* --compile mine$") as raised:
        MINE.open(graph, LoadOptions(dimensions=SIZES))
    assert f"target-B1-S64.onnx: built for {field} {there!r}, " in str(raised.value)


def test_another_version_and_another_device_are_refused(install: Install, graph: Path) -> None:
    """The same as a user meets it."""
    install(built_in=("MineExecutionProvider",))
    MINE.compile(graph, "fp16")
    with pytest.raises(ProviderError, match=r"built for device 'chip=7', but here it is 'chip=8'"):
        MINE.open(graph, LoadOptions(options={"chip": "8"}))
    install(built_in=("MineExecutionProvider",), __version__="1.33.0")
    with pytest.raises(ProviderError, match=r"for version 'onnxruntime 1\.32\.0', but here it is 'onnxruntime 1\.33"):
        MINE.open(graph)


def test_the_version_of_a_plug_in_counts(install: Install, graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qnn = find_provider("qnn")
    assert isinstance(qnn, OnnxRuntimeProvider)
    install(qnn, libraries={"/vendor/plugin.so": [FakeDevice("QNNExecutionProvider")]})
    monkeypatch.setattr("dspark.providers.onnxruntime.provider.metadata.version", lambda name: "2.7.0")
    assert qnn.compile(graph, "fp16").version == "onnxruntime 1.32.0, onnxruntime-qnn 2.7.0"
    qnn.open(graph, LoadOptions(options={"htp_performance_mode": "burst"}))
    monkeypatch.setattr("dspark.providers.onnxruntime.provider.metadata.version", lambda name: "2.8.0")
    with pytest.raises(ProviderError, match=r"onnxruntime-qnn 2\.7\.0', but here it is '.*onnxruntime-qnn 2\.8\.0'"):
        qnn.open(graph)


def test_a_key_that_is_gone_or_damaged(runtime: FakeOnnxRuntime, graph: Path) -> None:
    MINE.compile(graph, "fp16")
    key = graph.parent / "engines" / "mine" / "target.json"
    for damage in (lambda: key.write_text("{}"), key.unlink):
        damage()
        with pytest.raises(ProviderError, match=r"target\.json: is no key of an engine"):
            MINE.open(graph)


def test_a_graph_that_is_gone_and_was_compiled_for_others(runtime: FakeOnnxRuntime, graph: Path) -> None:
    MINE.compile(graph, "fp16", LoadOptions(dimensions=SIZES))
    graph.unlink()
    with pytest.raises(ProviderError) as raised:
        find_provider("cpu").open(graph)
    assert str(raised.value) == (
        f"{graph}: is gone, and there is no cpu/target.onnx but mine/target-B1-S64.json in engines: "
        "run it with the provider that it was compiled for, or export it again"
    )


def test_nodes_that_would_fall_are_named(install: Install, graph: Path) -> None:
    install(built_in=("MineExecutionProvider",), fallen=[("rope/Sin_3", "Sin")])
    with pytest.raises(ProviderError, match=r"mine cannot run 1 of the graph's nodes: rope/Sin_3 \(Sin\)"):
        MINE.compile(graph, "fp16")


def test_a_provider_that_writes_nothing_or_cannot_read_it(install: Install, graph: Path) -> None:
    install(built_in=("MineExecutionProvider",), compiles=False)
    with pytest.raises(ProviderError, match=r"target\.onnx: MineExecutionProvider does not write compiled models"):
        MINE.compile(graph, "fp16")
    install(built_in=("MineExecutionProvider",), unreadable="Unhandled exception type: 1")
    with pytest.raises(ProviderError, match=r"was compiled, but the result cannot be loaded: .* exception type: 1"):
        MINE.compile(graph, "fp16")


@pytest.mark.parametrize("name", ["cpu", "cuda", "webgpu"])
def test_kernel_by_kernel_there_is_nothing_to_compile(name: str, runtime: FakeOnnxRuntime) -> None:
    with pytest.raises(ProviderError, match=f"{name} runs graphs kernel by kernel and compiles nothing ahead of time"):
        find_provider(name).require_compiler()


def test_openvino_without_its_reader_is_refused_before_it_compiles(install: Install, tmp_path: Path) -> None:
    """As onnxruntime-openvino 1.24 is."""
    openvino = find_provider("openvino")
    folder = tmp_path / "onnxruntime"
    (folder / "capi").mkdir(parents=True)
    install(built_in=("OpenVINOExecutionProvider",), __file__=str(folder / "__init__.py"))
    with pytest.raises(ProviderError, match=r"openvino: .* no openvino_ir_frontend, .*the plug-in .* has it: pip inst"):
        openvino.require_compiler()
    openvino.require_compiler({"device_type": "NPU"})
    (folder / "capi" / "libopenvino_ir_frontend.so.2541").touch()
    openvino.require_compiler()
    install(openvino, libraries={"/vendor/plugin.so": [FakeDevice("OpenVINOExecutionProvider", "CPU")]})
    openvino.require_compiler()


def test_code_for_a_gpu_is_for_its_model(install: Install, graph: Path) -> None:
    openvino = find_provider("openvino")
    assert isinstance(openvino, OnnxRuntimeProvider)

    def devices(gpu: str) -> None:
        there = {"CPU": "Xeon", "GPU": gpu}
        drives = [
            FakeDevice("OpenVINOExecutionProvider", kind, {"ov_device": kind, "FULL_DEVICE_NAME": name})
            for kind, name in there.items()
        ]
        install(openvino, libraries={"/vendor/plugin.so": drives})

    devices("Arc A770")
    gpu = LoadOptions(options={"device_type": "GPU"})
    assert openvino.compile(graph, "fp16", gpu).device == "device_type=GPU (Arc A770)"
    devices("Arc B580")
    expected = r"built for device 'device_type=GPU \(Arc A770\)', but here it is 'device_type=GPU \(Arc B580\)'"
    with pytest.raises(ProviderError, match=expected):
        openvino.open(graph, gpu)
    assert openvino.compile(graph, "fp16").device == "device_type=CPU"
