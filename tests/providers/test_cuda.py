"""ONNX Runtime's CUDA session: its code runs here on the CPU provider, with the host's memory for the device's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from dspark.providers import Call, DeviceSession, LoadOptions, ProviderError, Session, find_provider
from dspark.providers.cuda import CUDA, CudaSession
from dspark.runtime import Bundle, DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.errors import RequestError
from tests.providers import fake_cuda

GoldenBundle = Callable[..., Path]
PROMPTS = [[ord(letter) for letter in text] for text in ("abcabcab", "Hello there, how are", "12", "x = y + ")]


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.FakeCuda:
    return fake_cuda.install(monkeypatch)


def on_host(model: Path) -> CudaSession:
    """A session whose device is the host."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return CudaSession(model, session, memory="cpu")


def in_place_graph(folder: Path) -> Path:
    """``present = TensorScatter(past, new, row)``, ``total = ReduceSum(present)``."""
    tape = ir.tape.Tape()
    shapes = {"past": ("B", 2, "S", 4), "new": ("B", 2, "T", 4)}
    past, new = (ir.val(name, ir.DataType.FLOAT, shape) for name, shape in shapes.items())
    row = ir.val("row", ir.DataType.INT64, ("B",))
    present = tape.op("TensorScatter", [past, new, row], {"axis": -2})
    present.name, present.type, present.shape = "present", ir.TensorType(ir.DataType.FLOAT), ir.Shape(shapes["past"])
    total = tape.op("ReduceSum", [present], {"keepdims": 0})
    total.name, total.type, total.shape = "total", ir.TensorType(ir.DataType.FLOAT), ir.Shape(())
    graph = ir.Graph([past, new, row], [present, total], nodes=tape.nodes, opset_imports={"": 24}, name="in_place")
    ir.save(ir.Model(graph, ir_version=11), folder / "in_place.onnx")
    return folder / "in_place.onnx"


def generate(bundle: Bundle, sessions: Mapping[str, Session]) -> list[list[int]]:
    model = DSparkInference(bundle, sessions, SpeculationOptions("fixed"), 2, bundle.manifest.target.context_length)
    done = model.generate(PROMPTS, SamplingParams(max_new_tokens=60))
    return [completion.token_ids for completion in done]


@pytest.mark.parametrize("drafter", ["dspark_gated", "eagle3"])
@pytest.mark.parametrize("cache_form", ["in-place", "delta"])
def test_generation_equals_the_cpu_providers(cache_form: str, drafter: str, golden_bundle: GoldenBundle) -> None:
    """With the cache on the device: it grows, requests leave and others move up."""
    bundle = Bundle.open(golden_bundle(drafter, cache_form))
    files = {name: bundle.file(file) for name, file in bundle.manifest.graphs.model_dump(exclude_none=True).items()}
    one_thread = LoadOptions(threads=1)
    expected = generate(bundle, {name: find_provider("cpu").open(file, one_thread) for name, file in files.items()})
    assert generate(bundle, {name: on_host(file) for name, file in files.items()}) == expected


def test_rounds_copy_no_cache_rows(golden_bundle: GoldenBundle, cuda: fake_cuda.FakeCuda) -> None:
    """In the in-place form what a round does to the cache it does on the device."""
    bundle = Bundle.open(golden_bundle("dspark_gated", "in-place"))
    files = bundle.manifest.graphs.model_dump(exclude_none=True)
    sessions = {name: on_host(bundle.file(file)) for name, file in files.items()}
    model = DSparkInference(bundle, sessions, SpeculationOptions("fixed"), 1, bundle.manifest.target.context_length)
    stream = model.stream(PROMPTS[0], SamplingParams(max_new_tokens=20))
    next(stream)
    cuda.events.clear()
    assert len(list(stream)) > 2
    assert not [event for event in cuda.events if event[0].endswith(("Device", "Host"))]


def test_a_cache_of_a_size_that_the_target_was_compiled_for(golden_bundle: GoldenBundle) -> None:
    """It has that size from the beginning and never another."""
    bundle = Bundle.open(golden_bundle("dspark_gated", "in-place"))
    files = bundle.manifest.graphs.model_dump(exclude_none=True)
    sessions = {name: on_host(bundle.file(file)) for name, file in files.items()}
    free = generate(bundle, sessions)
    sessions["target"].cache_capacity = 192
    seen = set()
    bind = sessions["target"].bind

    def watched(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Call:
        seen.add(inputs["past.0.key"].shape[2])
        return bind(inputs, outputs)

    sessions["target"].bind = watched  # type: ignore[method-assign]
    assert generate(bundle, sessions) == free
    assert seen == {192}


def test_texts_are_bounded_by_the_size_that_the_target_was_compiled_for(
    golden_bundle: GoldenBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = golden_bundle("dspark_gated", "in-place")

    def compiled(provider: object, model: Path, how: LoadOptions) -> Session:
        session = on_host(model)
        session.cache_capacity = 192
        return session

    monkeypatch.setattr(type(CUDA), "open", compiled)
    assert DSparkInference.load(path, provider="cuda").context_length == 192 - 5
    assert DSparkInference.load(path, provider="cuda", max_sequence_length=100).context_length == 100
    with pytest.raises(RequestError, match="max_sequence_length is 188; this bundle allows 2 to 187"):
        DSparkInference.load(path, provider="cuda", max_sequence_length=188)


def test_a_cache_on_the_device_is_read_where_it_lies(golden_bundle: GoldenBundle, cuda: fake_cuda.FakeCuda) -> None:
    bundle = Bundle.open(golden_bundle("qwen3_target", "delta"))
    info = bundle.manifest.target.cache
    rng = np.random.default_rng(0)
    past = rng.normal(size=(info.layers, 2, 3, info.kv_heads, 4, info.head_dim)).astype(np.float32)
    small: dict[str, NDArray[Any]] = {
        "input_ids": np.array([5, 6, 7]),
        "position_ids": np.array([4, 4, 5]),
        "pad_index": np.array([[0, 0], [1, 2]]),
        "unpad_index": np.array([0, 2, 3]),
        "attention_bias": np.zeros((2, 1, 1, 2, 6), np.float32),
        "logits_index": np.arange(3),
    }
    session = on_host(bundle.file("target.onnx"))
    assert isinstance(session, DeviceSession)
    cache = session.device_array(past.shape, np.float32)
    cache[:] = past

    def logits(cached: Callable[[int, int], Any]) -> NDArray[np.float32]:
        result = np.zeros((3, bundle.manifest.target.vocabulary_size), np.float32)
        names = {
            f"past.{layer}.{part}": cached(layer, number)
            for layer in range(info.layers)
            for number, part in enumerate(("key", "value"))
        }
        session.bind({**small, **names}, {"logits": result}).run()
        return result

    expected = logits(lambda layer, part: past[layer, part, 1:3])
    cuda.events.clear()
    np.testing.assert_array_equal(logits(lambda layer, part: cache[layer, part, 1:3]), expected)
    assert cuda.events == []
    assert np.abs(expected).max() > 0


def test_a_graph_writes_its_cache_in_place(tmp_path: Path) -> None:
    """Input and output are one buffer: what a step wrote, the next one reads."""
    session = on_host(in_place_graph(tmp_path))
    cache = session.device_array((3, 2, 8, 4), np.float32)
    part = cache[1:3]
    new, row, total = np.zeros((2, 2, 2, 4), np.float32), np.zeros(2, np.int64), np.zeros((), np.float32)
    call = session.bind({"past": part, "new": new, "row": row}, {"present": part, "total": total})
    expected = np.zeros(cache.shape, np.float32)
    for step in range(3):
        new[:] = step + 1
        row[:] = (2 * step, 5 - step)
        call.run()
        expected[1, :, 2 * step : 2 * step + 2] = expected[2, :, 5 - step : 7 - step] = step + 1
        assert total == expected.sum()
    np.testing.assert_array_equal(cache.read(), expected)


def test_host_inputs_are_bound_again_at_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime copies a host array to a device when it is bound, as ``CopyAtBind`` does here."""
    session = on_host(in_place_graph(tmp_path))
    binding = onnxruntime.IOBinding

    class CopyAtBind(binding):  # type: ignore[misc, valid-type]
        copies: Mapping[str, NDArray[Any]] = {}

        def bind_input(self, name: str, place: str, number: int, dtype: Any, shape: Any, address: int) -> None:
            if name in host:
                self.copies = {**self.copies, name: host[name].copy()}
                address = self.copies[name].ctypes.data
            super().bind_input(name, place, number, dtype, shape, address)

    monkeypatch.setattr(onnxruntime.InferenceSession, "io_binding", lambda self: CopyAtBind(self))
    host = {"new": np.zeros((1, 2, 1, 4), np.float32), "row": np.zeros(1, np.int64)}
    cache, total = session.device_array((1, 2, 8, 4), np.float32), np.zeros((), np.float32)
    call = session.bind({"past": cache, **host}, {"present": cache, "total": total})
    for value in (1, 2):
        host["new"][:] = value
        host["row"][:] = value
        call.run()
    assert total == 8 * (1 + 2)


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    session = on_host(in_place_graph(tmp_path))
    cache = session.device_array((1, 2, 8, 4), np.float32)
    given = {"past": cache, "new": np.zeros((1, 2, 1, 4), np.float32), "row": np.zeros(1, np.int64)}
    with pytest.raises(ProviderError, match=r"in_place\.onnx: the graph has no input other"):
        session.bind({**given, "other": np.zeros(1)}, {"present": cache})
    outside = session.bind({**given, "row": np.array([8])}, {"present": cache})
    with pytest.raises(ProviderError, match=r"in_place\.onnx: the graph cannot be run: .*TensorScatter"):
        outside.run()


def test_without_the_provider_the_error_lists_what_there_is(tmp_path: Path) -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has it")
    with pytest.raises(ProviderError, match=r"CUDAExecutionProvider is not in this ONNX Runtime \(.*CPU"):
        CUDA.open(in_place_graph(tmp_path))


def test_a_gpu_that_cannot_be_used_is_no_silent_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime lists the provider, fails to load CUDA's libraries, and goes on with the CPU."""
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    create = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda *args, **named: create(*args, providers=["CPUExecutionProvider"])
    )
    with pytest.raises(
        ProviderError,
        match=r"CUDAExecutionProvider did not start, .* CPUExecutionProvider instead",
    ):
        CUDA.open(in_place_graph(tmp_path))
