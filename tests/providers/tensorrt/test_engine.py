"""Engines: what the builder is asked for, what lies beside an engine, and when one is refused."""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.providers import CompileOptions, ProviderError, SessionLimits
from dspark.providers.engine_key import EngineKey
from dspark.providers.tensorrt.engine import TENSORRT_BACKEND, TENSORRT_RTX_BACKEND, build_engine, open_engine
from tests.support import fake_cuda, fake_tensorrt
from tests.support.fake_tensorrt import FakeTensorRt

LIMITS = SessionLimits(requests=4, prompt_tokens=256, tokens_per_request=256, cache_tokens=4096)
HOW = CompileOptions("fp16", limits=LIMITS, draft_tokens=5)


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRt:
    return fake_tensorrt.install(monkeypatch, fake_cuda.install(monkeypatch))


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    (tmp_path / "target.onnx").write_bytes(b"graph")
    return tmp_path / "target.onnx"


def build(graph: Path) -> EngineKey:
    return build_engine(TENSORRT_BACKEND, graph, HOW)


def test_the_network_is_strongly_typed_and_every_input_has_a_range(trt: FakeTensorRt, graph: Path) -> None:
    key = build(graph)
    assert trt.flags == 1 << trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    assert list(key.profiles) == ["draft", "extension"]  # the fake's inputs are those of an EAGLE-3 drafter
    assert [profile.shapes["x"] for profile in trt.profiles] == [((1, 1), (1, 6), (4, 6)), ((1, 1), (1, 256), (4, 256))]
    assert {name for profile in trt.profiles for name in profile.shapes} == {"x", "row", "past"}


def test_engine_key_and_timings_lie_in_the_devices_folder(trt: FakeTensorRt, graph: Path) -> None:
    build(graph)
    folder = graph.parent / "engines" / "sm90"
    assert {file.name for file in folder.iterdir()} == {"target.engine", "target.json", "timing.cache"}
    key = json.loads((folder / "target.json").read_text())
    assert key["graph"] == hashlib.sha256(b"graph").hexdigest()
    assert (key["backend"], key["version"], key["device"]) == ("tensorrt", "11.4.0", "Fake GPU (sm90)")
    assert (key["precision"], key["layers"]) == ("fp16", 3)
    assert key["profiles"]["draft"] == {"B": [1, 1, 4], "T": [1, 6, 6], "S": [1, 1024, 4096]}


def test_timings_are_used_again(trt: FakeTensorRt, graph: Path) -> None:
    build(graph)
    build(graph)
    assert trt.timings == [b"", b"timings"]
    (graph.parent / "engines" / "sm90" / "timing.cache").write_bytes(b"of another version")
    build(graph)
    assert trt.timings[2:] == [b"of another version", b""]


def test_phases_are_told(trt: FakeTensorRt, graph: Path) -> None:
    phases: list[str] = []
    build_engine(TENSORRT_BACKEND, graph, replace(HOW, on_phase=phases.append))
    assert phases == ["Building engine"]


def test_an_interrupt_ends_the_build_and_leaves_no_engine(
    trt: FakeTensorRt, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder is asked to stop at its next step, and the interrupt goes on."""

    class Interrupted:
        def __init__(self, threads: int) -> None:
            self.work: object = None

        def __enter__(self) -> "Interrupted":
            return self

        def __exit__(self, *arguments: object) -> None:
            assert self.run() is None

        def submit(self, function: object, *arguments: object) -> "Interrupted":
            self.run = lambda: function(*arguments)  # type: ignore[operator]
            return self

        def result(self) -> bytes:
            raise KeyboardInterrupt

    monkeypatch.setattr("dspark.providers.tensorrt.engine.ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(graph)
    assert trt.cancelled
    assert not (graph.parent / "engines" / "sm90" / "target.engine").exists()


def test_what_cannot_be_parsed_or_built_is_told(trt: FakeTensorRt, graph: Path) -> None:
    trt.build_problem = "no kernel\n  for Gemm"
    with pytest.raises(ProviderError, match=r"target\.onnx: tensorrt cannot build the engine: no kernel for Gemm$"):
        build(graph)
    trt.parse_problem = "no importer for QGemm"
    with pytest.raises(ProviderError, match=r"target\.onnx: tensorrt cannot parse the graph: no importer for QGemm$"):
        build(graph)


def test_an_engine_opens_where_it_was_built(trt: FakeTensorRt, graph: Path) -> None:
    key = build(graph)
    opened = open_engine(TENSORRT_BACKEND, graph)
    assert opened.key == key
    assert opened.native is trt.engine


def test_an_engine_opens_in_another_folder_without_its_graph(trt: FakeTensorRt, graph: Path, tmp_path: Path) -> None:
    build(graph)
    graph.unlink()
    moved = tmp_path / "moved"
    moved.mkdir()
    (graph.parent / "engines").rename(moved / "engines")
    assert open_engine(TENSORRT_BACKEND, moved / "target.onnx").native is trt.engine


@pytest.mark.parametrize(
    ("field", "there", "here"),
    [
        ("version", "11.3.0", "11.4.0"),
        ("device", "Other GPU (sm90)", r"Fake GPU \(sm90\)"),
        ("backend", "tensorrt-rtx", "tensorrt"),
    ],
)
def test_an_engine_for_something_else_is_refused_with_both_values(
    field: str, there: str, here: str, trt: FakeTensorRt, graph: Path
) -> None:
    build(graph)
    file = graph.parent / "engines" / "sm90" / "target.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: there}))
    advice = "compile it with dspark-export --compile tensorrt"
    expected = rf"built for {field} '{there.replace('(', '.').replace(')', '.')}', but here it is '{here}'; {advice}"
    with pytest.raises(ProviderError, match=expected):
        open_engine(TENSORRT_BACKEND, graph)


def test_no_engine_a_damaged_engine_and_a_damaged_key(trt: FakeTensorRt, graph: Path) -> None:
    with pytest.raises(ProviderError, match=r"target\.engine: no engine for tensorrt here; compile it with"):
        open_engine(TENSORRT_BACKEND, graph)
    build(graph)
    folder = graph.parent / "engines" / "sm90"
    (folder / "target.engine").write_bytes(b"garbage")
    with pytest.raises(ProviderError, match=r"target\.engine: tensorrt cannot load the engine: bad magic number$"):
        open_engine(TENSORRT_BACKEND, graph)
    for content in ("", "[]", "{}"):
        (folder / "target.json").write_text(content)
        with pytest.raises(ProviderError, match=r"target\.json: is no key of an engine"):
            open_engine(TENSORRT_BACKEND, graph)


def test_a_library_that_is_not_installed_is_named(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, package in ((TENSORRT_BACKEND, "tensorrt"), (TENSORRT_RTX_BACKEND, "tensorrt-rtx")):
        monkeypatch.setitem(sys.modules, backend.module, None)
        with pytest.raises(
            ProviderError, match=rf"{package} is not installed; pip install 'dspark-onnx\[{package}\]'$"
        ):
            build_engine(backend, graph, HOW)
