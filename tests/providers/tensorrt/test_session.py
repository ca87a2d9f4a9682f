"""A native session over a fake context that checks pointers, shapes, ranges and the order on the stream."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark.providers import DeviceSession, LoadOptions, ProviderError, find_provider
from dspark.providers.cuda.graph import CAPTURED_AFTER
from dspark.providers.tensorrt.engine import TENSORRT_BACKEND, TENSORRT_RTX_BACKEND, Backend
from dspark.providers.tensorrt.session import TensorRtSession
from tests.support import fake_cuda, fake_tensorrt
from tests.support.fake_cuda import FakeCuda

Arrays = dict[str, NDArray[Any]]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda.install(monkeypatch)


def session(
    folder: Path,
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    *,
    in_place: bool = False,
    graphs: bool = False,
    backend: Backend = TENSORRT_BACKEND,
) -> TensorRtSession:
    fake = fake_tensorrt.install(monkeypatch, cuda, in_place=in_place)
    engines = folder / "engines" / backend.device()[0]
    engines.mkdir(parents=True)
    (engines / "target.engine").write_bytes(b"engine")
    key = {
        "backend": backend.name,
        "version": fake.__version__,
        "device": backend.device()[1],
        "graph": "",
        "precision": "fp16",
        "layers": 3,
        "profiles": fake_tensorrt.PROFILES,
    }
    (engines / "target.json").write_text(json.dumps(key))
    return TensorRtSession(backend, folder / "target.onnx", cuda_graphs=graphs)


def inputs(batch: int = 2, width: int = 1, capacity: int = 8) -> Arrays:
    return {
        "x": np.zeros((batch, width), np.float32),
        "row": np.zeros(batch, np.int64),
        "past": np.zeros((batch, capacity), np.float32),
    }


def outputs(batch: int = 2, width: int = 1) -> Arrays:
    return {"y": np.zeros((batch, width), np.float32), "count": np.zeros(batch, np.int64)}


def expected(given: Arrays) -> NDArray[np.float32]:
    result: NDArray[np.float32] = 2 * given["x"] + given["past"].sum(axis=1, keepdims=True)
    return result


def test_a_call_reads_and_writes_the_same_arrays(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, results = inputs(), outputs()
    call = session(tmp_path, cuda, monkeypatch).bind(given, results)
    rng = np.random.default_rng(0)
    for number in range(3):
        given["x"][:] = rng.normal(size=(2, 1))
        given["past"][:] = rng.normal(size=(2, 8))
        given["row"][:] = number
        call.run()
        np.testing.assert_allclose(results["y"], expected(given), rtol=1e-6)
        assert results["count"].tolist() == [number + 1] * 2


def test_the_order_on_the_stream(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(tmp_path, cuda, monkeypatch)
    one, other = (opened.bind(inputs(), outputs()) for _ in range(2))
    one.run()
    other.run()
    cuda.events.clear()
    one.run()
    names = [event[0] for event in cuda.events]
    assert names == ["HostToDevice", *["shape"] * 3, *["address"] * 6, "execute", "DeviceToHost", "synchronize"]
    cuda.events.clear()
    one.run()  # nothing has changed but the content
    assert [event[0] for event in cuda.events] == ["HostToDevice", "execute", "DeviceToHost", "synchronize"]


def test_calls_of_different_shapes_take_turns(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds its own profile, shapes and addresses again, also after the other made the buffers grow."""
    opened = session(tmp_path, cuda, monkeypatch)
    shapes = [(1, 1, 4), (1, 32, 16), (4, 1, 16)]
    bound = [(given := inputs(*shape), results := outputs(*shape[:2]), opened.bind(given, results)) for shape in shapes]
    rng = np.random.default_rng(0)
    for index in (0, 1, 0, 2, 2, 1, 0):
        given, results, call = bound[index]
        given["x"][:] = rng.normal(size=given["x"].shape)
        given["past"][:] = rng.normal(size=given["past"].shape)
        cuda.events.clear()
        call.run()
        np.testing.assert_allclose(results["y"], expected(given), rtol=1e-5)
    assert ("profile", 0) in cuda.events  # from prefill, which ran before


def test_the_narrowest_profile_is_chosen(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(tmp_path, cuda, monkeypatch)
    for width, profile in ((1, 0), (2, 1), (32, 1), (1, 0)):
        opened.bind(inputs(1, width), outputs(1, width)).run()
        engine = fake_engine()
        assert engine.contexts[0].active_optimization_profile == profile


def fake_engine() -> fake_tensorrt.FakeEngine:
    engine: fake_tensorrt.FakeEngine = sys.modules["tensorrt"].engine
    return engine


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (5, 1, 8),
            r"target \(tensorrt\): x has shape \[5, 1\]; .* built for \[1, 1\] to \[4, 1\] \(profile decode\)",
        ),
        (
            (1, 33, 8),
            r"x has shape \[1, 33\]; .* \[1, 1\] to \[1, 32\] \(profile prefill\)|x has shape \[1, 33\].*decode",
        ),
        ((2, 1, 17), r"past has shape \[2, 17\]; the engine was built for \[1, 1\] to \[4, 16\] \(profile decode\)"),
    ],
)
def test_shapes_outside_all_profiles_are_named(
    shape: tuple[int, int, int], message: str, tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProviderError, match=message):
        session(tmp_path, cuda, monkeypatch).bind(inputs(*shape), outputs(*shape[:2]))


def test_wrong_names_types_and_output_shapes_are_named(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = session(tmp_path, cuda, monkeypatch)
    cases = [
        ({**inputs(), "z": np.zeros(1)}, outputs(), "z cannot be bound; the engine has x, row, past"),
        (inputs(), {"z": np.zeros(1)}, "z cannot be bound; the engine has y, count, present"),
        ({**inputs(), "row": np.zeros(2, np.int32)}, outputs(), "row is int32; the engine has int64"),
        ({name: array for name, array in inputs().items() if name != "x"}, outputs(), "x is not bound"),
        (inputs(), outputs(3), r"y is bound to shape \[3, 1\]; the engine computes \[2, 1\]"),
    ]
    for given, results, message in cases:
        with pytest.raises(ProviderError, match=message):
            opened.bind(given, results)


def test_device_arrays_are_not_copied(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output of one call is the input of the next, and the host sees only what it asks for."""
    opened = session(tmp_path, cuda, monkeypatch)
    assert isinstance(opened, DeviceSession)
    first, second = (opened.device_array((2, 8), np.float32) for _ in range(2))
    given, results = inputs(), outputs()
    calls = [
        opened.bind({**given, "past": past}, {**results, "present": present})
        for past, present in ((first, second), (second, first))
    ]
    given["x"][:] = [[1], [2]]
    calls[0].run()
    cuda.events.clear()
    given["row"][:] = 3
    calls[1].run()
    copied = {event[0]: event[1] for event in cuda.events if event[0].endswith(("Device", "Host"))}
    assert copied == {"HostToDevice": 2 * 256, "DeviceToHost": 2 * 256}  # x and row, y and count, aligned
    assert results["y"].tolist() == [[2 + 1], [4 + 2]]
    np.testing.assert_array_equal(first.read(), [[1, 0, 0, 1, 0, 0, 0, 0], [2, 0, 0, 2, 0, 0, 0, 0]])


def test_a_cache_that_is_written_in_place(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer is input and output; slots of a larger cache are parts of it."""
    opened = session(tmp_path, cuda, monkeypatch, in_place=True)
    cache = opened.device_array((3, 32, 8), np.float32)
    part = cache[1, 8:10]
    given, results = inputs(), outputs()
    call = opened.bind({**given, "past": part}, {**results, "present": part})
    for step in range(3):
        given["x"][:] = step + 1
        given["row"][:] = step
        call.run()
    held = cache.read()
    np.testing.assert_array_equal(held[1, 8:10], [[1, 2, 3, 0, 0, 0, 0, 0]] * 2)
    assert held.sum() == 12
    assert results["y"].tolist() == [[2 * 3 + 1 + 2]] * 2


@pytest.mark.parametrize("bound", ["other", "host", "nothing"])
def test_an_in_place_output_must_be_bound_to_its_input(
    bound: str, tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = session(tmp_path, cuda, monkeypatch, in_place=True)
    past, other = (opened.device_array((2, 8), np.float32) for _ in range(2))
    present = {"other": {"present": other}, "host": {"present": np.zeros((2, 8), np.float32)}, "nothing": {}}[bound]
    with pytest.raises(ProviderError, match="present must be bound to the same device array as past"):
        opened.bind({**inputs(), "past": past}, {**outputs(), **present})


def test_a_part_that_is_not_aligned_is_refused(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(tmp_path, cuda, monkeypatch)
    cache = opened.device_array((4, 8), np.float32)
    with pytest.raises(ProviderError, match=r"past begins 32 bytes after a multiple of 256"):
        opened.bind({**inputs(), "past": cache[1:3]}, outputs())


def test_an_array_with_gaps_is_refused(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(tmp_path, cuda, monkeypatch)
    cache = opened.device_array((2, 16), np.float32)
    with pytest.raises(ProviderError, match="past is bound to an array with gaps"):
        opened.bind({**inputs(), "past": cache[:, :8]}, outputs())


def test_memory_of_another_device_is_refused(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        shape, dtype = (2, 8), np.dtype(np.float32)

    with pytest.raises(ProviderError, match="a Foreign cannot be used by a CUDA device"):
        session(tmp_path, cuda, monkeypatch).bind({**inputs(), "past": Foreign()}, outputs())  # type: ignore[dict-item]


def test_an_engine_that_fails_says_why(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(tmp_path, cuda, monkeypatch)
    given, results = inputs(), outputs()
    call = opened.bind(given, results)
    module = sys.modules["tensorrt"]

    def fail(stream: int) -> bool:
        module.log.log(module.ILogger.ERROR, "illegal memory\naccess")
        return False

    with monkeypatch.context() as broken:
        broken.setattr(fake_engine().contexts[0], "execute_async_v3", fail)
        for _ in range(2):
            with pytest.raises(ProviderError, match=r"\(tensorrt\): the engine cannot be run: illegal memory access$"):
                call.run()
    given["x"][:] = 1
    call.run()
    assert results["y"].tolist() == [[2], [2]]


def test_staging_memory_does_not_grow_with_calls(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = session(tmp_path, cuda, monkeypatch)
    calls = [opened.bind(inputs(4), outputs(4)) for _ in range(20)]
    calls[0].run()
    device, pinned = dict(cuda.device), dict(cuda.pinned)
    for call in calls:
        call.run()
    assert (cuda.device, cuda.pinned) == (device, pinned)


# --- CUDA graphs ---


def names(cuda: FakeCuda) -> list[str]:
    return [event[0] for event in cuda.events]


REPLAYED = ["HostToDevice", "launch", "DeviceToHost", "synchronize"]


def test_a_call_that_repeats_is_captured_and_launched(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = session(tmp_path, cuda, monkeypatch, graphs=True)
    given, results = inputs(), outputs()
    call = opened.bind(given, results)
    rng = np.random.default_rng(0)
    for number in range(CAPTURED_AFTER + 3):
        cuda.events.clear()
        given["x"][:] = rng.normal(size=(2, 1))
        given["row"][:] = number % 8
        call.run()
        np.testing.assert_allclose(results["y"], expected(given), rtol=1e-6)
        assert results["count"].tolist() == [number % 8 + 1] * 2
        if number < CAPTURED_AFTER:
            assert "execute" in names(cuda)
            assert "launch" not in names(cuda)
        elif number == CAPTURED_AFTER:  # one run settles the new context before it is captured
            assert [name for name in names(cuda) if name in ("execute", "capture", "launch")] == [
                *("execute", "capture", "launch")
            ]
        else:
            assert names(cuda) == REPLAYED


def test_graphs_of_calls_take_turns_and_end_with_them(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = session(tmp_path, cuda, monkeypatch, graphs=True)
    bound = [(given := inputs(batch), results := outputs(batch), opened.bind(given, results)) for batch in (1, 2)]
    for number in range(2 * CAPTURED_AFTER + 4):
        given, results, call = bound[number % 2]
        given["x"][:] = number
        call.run()
        np.testing.assert_allclose(results["y"], expected(given))
    assert len(cuda.graphs) == 2
    contexts = fake_engine().contexts[1:]
    assert len({context.memory for context in contexts}) == 1  # they take turns, so one piece will do
    del bound, call
    opened.bind(inputs(3), outputs(3)).run()  # the session knows its latest call
    assert not cuda.graphs


def test_a_graph_is_captured_again_when_its_addresses_have_changed(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = session(tmp_path, cuda, monkeypatch, graphs=True)
    given, results = inputs(1), outputs(1)
    call = opened.bind({**given, "past": opened.device_array((1, 8), np.float32)}, results)
    for _ in range(CAPTURED_AFTER + 1):
        call.run()
    opened.bind(inputs(1), outputs(1)).run()  # has one more host array, so the staging memory is too small
    cuda.events.clear()
    given["x"][:] = 5
    call.run()
    assert names(cuda).count("capture") == 1
    assert results["y"].tolist() == [[10]]
    cuda.events.clear()
    given["x"][:] = 6
    call.run()
    assert names(cuda) == REPLAYED
    assert results["y"].tolist() == [[12]]
    assert len(cuda.graphs) == 1


def test_a_cache_is_written_in_place_by_a_graph(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that settles a context and the graph's first one write the same."""
    opened = session(tmp_path, cuda, monkeypatch, in_place=True, graphs=True)
    given, results = inputs(1, 1, 16), outputs(1)
    cache = opened.device_array((1, 16), np.float32)
    call = opened.bind({**given, "past": cache}, {**results, "present": cache})
    for step in range(CAPTURED_AFTER + 3):
        given["x"][:] = step + 1
        given["row"][:] = step
        call.run()
    np.testing.assert_array_equal(cache.read()[0, : CAPTURED_AFTER + 3], np.arange(1, CAPTURED_AFTER + 4))


def test_an_engine_that_cannot_be_captured_runs_as_before(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = session(tmp_path, cuda, monkeypatch, graphs=True)
    cuda.capturable = False
    given, results = inputs(), outputs()
    call = opened.bind(given, results)
    for number in range(CAPTURED_AFTER + 3):
        given["x"][:] = number
        call.run()
        np.testing.assert_allclose(results["y"], expected(given))
    assert names(cuda).count("capture") == 1  # it is not tried again
    (told,) = caplog.messages
    assert "target (tensorrt): runs without CUDA graphs: cudaStreamEndCapture failed: operation failed" in told


def test_tensorrt_for_rtx_captures_by_itself(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(tmp_path, cuda, monkeypatch, graphs=True, backend=TENSORRT_RTX_BACKEND)
    (context,) = fake_engine().contexts
    assert context.how.cuda_graph_strategy == "WHOLE_GRAPH_CAPTURE"
    call = opened.bind(inputs(), outputs())
    for _ in range(CAPTURED_AFTER + 3):
        call.run()
    assert "capture" not in names(cuda)


def test_graphs_are_an_option(tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    session(tmp_path, cuda, monkeypatch)
    model, provider = tmp_path / "target.onnx", find_provider("tensorrt")
    for value, captures in (("0", 0), ("1", 1)):
        call = provider.open(model, LoadOptions(options={"enable_cuda_graph": value})).bind(inputs(), outputs())
        cuda.events.clear()
        for _ in range(CAPTURED_AFTER + 1):
            call.run()
        assert names(cuda).count("capture") == captures
    with pytest.raises(ProviderError, match="enable_cuda_graph is 'yes'; it must be 0 or 1"):
        provider.open(model, LoadOptions(options={"enable_cuda_graph": "yes"}))
