"""Models compiled ahead of time through ONNX Runtime: what is asked for, what is loaded, and when it is refused."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from dspark.providers import CompileOptions, LoadOptions, OnnxRuntimeProvider, ProviderError, find_provider
from dspark.providers.provider import NOTHING
from tests.support.fake_onnxruntime import MINE, FakeDevice, FakeOnnxRuntime, Install

SIZES = {"B": 1, "S": 64, "S+T": 70}


def compiling(options: Mapping[str, str] = NOTHING, *shapes: Mapping[str, int]) -> CompileOptions:
    return CompileOptions("fp16", options, shapes)


@pytest.fixture
def runtime(install: Install) -> FakeOnnxRuntime:
    return install(built_in=("MineExecutionProvider",))


def test_a_compiled_model_and_its_key_lie_in_the_providers_folder(runtime: FakeOnnxRuntime, graph: Path) -> None:
    assert MINE.compile(graph, compiling({"chip": "8"}, SIZES)) == "mine (chip=8) with onnxruntime 1.32.0: 1 shape"
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
    (first, providers), (loading, _) = runtime.sessions
    assert runtime.loaded == [graph, folder / "target-B1-S64.onnx"]  # it is tried out
    assert providers == [("MineExecutionProvider", {"chip": "8"})]
    assert first.dimensions == SIZES
    assert {name: first.config[name] for name in first.config if name.startswith("ep.")} == {
        "ep.context_enable": "1",
        "ep.context_file_path": str(folder / "target-B1-S64.onnx"),
        "ep.context_embed_mode": "0",
    }
    assert "ep.context_enable" not in loading.config
    for options in (first, loading):
        assert options.config["session.disable_cpu_ep_fallback"] == "1"


def test_it_runs_in_another_folder_without_its_graph(runtime: FakeOnnxRuntime, graph: Path, tmp_path: Path) -> None:
    MINE.compile(graph, compiling({}, SIZES))
    graph.unlink()
    graph.parent.rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "target.onnx"
    for use in (MINE.open, MINE.profile, MINE.placement):
        use(moved, LoadOptions(options={"verbose": "1"}, dimensions=SIZES))  # what only matters now is free
        assert runtime.loaded[-1] == moved.parent / "engines" / "mine" / "target-B1-S64.onnx"
        assert not runtime.sessions[-1][0].dimensions


def test_without_a_compiled_model_the_graph_is_loaded(runtime: FakeOnnxRuntime, graph: Path) -> None:
    MINE.compile(graph, compiling({}, SIZES))
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
    MINE.compile(graph, compiling({}, SIZES))
    key = graph.parent / "engines" / "mine" / "target-B1-S64.json"
    key.write_text(json.dumps({**json.loads(key.read_text()), field: there}))
    with pytest.raises(ProviderError, match=rf"but here it is {here}; compile it with .* --compile mine$") as raised:
        MINE.open(graph, LoadOptions(dimensions=SIZES))
    assert f"target-B1-S64.onnx: built for {field} {there!r}, " in str(raised.value)


def test_another_version_and_another_device_are_refused(install: Install, graph: Path) -> None:
    """The same as a user meets it."""
    install(built_in=("MineExecutionProvider",))
    MINE.compile(graph, compiling())
    with pytest.raises(ProviderError, match=r"built for device 'chip=7', but here it is 'chip=8'"):
        MINE.open(graph, LoadOptions(options={"chip": "8"}))
    install(built_in=("MineExecutionProvider",), __version__="1.33.0")
    with pytest.raises(ProviderError, match=r"for version 'onnxruntime 1\.32\.0', but here it is 'onnxruntime 1\.33"):
        MINE.open(graph)


def test_the_version_of_a_plug_in_counts(install: Install, graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qnn = find_provider("qnn")
    assert isinstance(qnn, OnnxRuntimeProvider)
    install(qnn, libraries={"/vendor/plugin.so": [FakeDevice("QNNExecutionProvider")]})
    monkeypatch.setattr("dspark.providers.onnxruntime.library.metadata.version", lambda name: "2.7.0")
    assert " with onnxruntime 1.32.0, onnxruntime-qnn 2.7.0: 1 shape" in qnn.compile(graph, compiling())
    qnn.open(graph, LoadOptions(options={"htp_performance_mode": "burst"}))
    monkeypatch.setattr("dspark.providers.onnxruntime.library.metadata.version", lambda name: "2.8.0")
    with pytest.raises(ProviderError, match=r"onnxruntime-qnn 2\.7\.0', but here it is '.*onnxruntime-qnn 2\.8\.0'"):
        qnn.open(graph)


def test_a_key_that_is_gone_or_damaged(runtime: FakeOnnxRuntime, graph: Path) -> None:
    MINE.compile(graph, compiling())
    key = graph.parent / "engines" / "mine" / "target.json"
    for damage in (lambda: key.write_text("{}"), key.unlink):
        damage()
        with pytest.raises(ProviderError, match=r"target\.json: is no key of an engine"):
            MINE.open(graph)


def test_a_graph_that_is_gone_and_was_compiled_for_others(runtime: FakeOnnxRuntime, graph: Path) -> None:
    MINE.compile(graph, compiling({}, SIZES))
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
        MINE.compile(graph, compiling())


def test_a_provider_that_writes_nothing_or_cannot_read_it(install: Install, graph: Path) -> None:
    install(built_in=("MineExecutionProvider",), compiles=False)
    with pytest.raises(ProviderError, match=r"target\.onnx: MineExecutionProvider does not write compiled models"):
        MINE.compile(graph, compiling())
    install(built_in=("MineExecutionProvider",), unreadable="Unhandled exception type: 1")
    with pytest.raises(ProviderError, match=r"was compiled, but the result cannot be loaded: .* exception type: 1"):
        MINE.compile(graph, compiling())


@pytest.mark.parametrize("name", ["cpu", "cuda", "webgpu"])
def test_kernel_by_kernel_there_is_nothing_to_compile(name: str, runtime: FakeOnnxRuntime) -> None:
    with pytest.raises(ProviderError, match=f"{name} runs graphs kernel by kernel and compiles nothing ahead of time"):
        find_provider(name).require_compiler()
