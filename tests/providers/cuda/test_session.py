"""ONNX Runtime's CUDA session: its code runs here on the CPU provider, with the host's memory for the device's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from dspark.providers import Call, DeviceSession, LoadOptions, ProviderError, Session, SessionLimits, find_provider
from dspark.providers.cuda.graph import CAPTURED_AFTER, ENABLE_CUDA_GRAPH
from dspark.providers.cuda.memory import CudaArray
from dspark.providers.cuda.session import CudaSession
from dspark.providers.cuda.staging import ALIGNMENT
from dspark.providers.descriptions.cuda import CUDA
from dspark.runtime import Bundle, DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.errors import RequestError
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.model.eagle3_drafter import Eagle3Drafter
from dspark.runtime.model.target import Verification
from tests.providers.cuda.in_place import in_place_graph
from tests.support import fake_cuda, fake_onnxruntime

GoldenBundle = Callable[..., Path]
PROMPTS = [[ord(letter) for letter in text] for text in ("abcabcab", "Hello there, how are", "12", "x = y + ")]


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.FakeCuda:
    return fake_cuda.install(monkeypatch)


def on_host(model: Path) -> CudaSession:
    """A session whose device is the host."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return CudaSession(model, session, memory="cpu")


def generate(bundle: Bundle, sessions: Mapping[str, Session]) -> list[list[int]]:
    """Greedy requests, and beside them others that read logits on the host."""
    model = DSparkInference(LoadedModel(bundle, sessions), ServingOptions(SpeculationOptions("fixed"), 2))
    settings = [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}, {}]
    done = model.generate(PROMPTS, [SamplingParams(max_new_tokens=100, **each) for each in settings])
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
    """In the in-place form what a round does to the cache it does on the device; what the head reads stays there.

    Of a greedy round's results the host gets tokens and confidences only.
    """
    bundle = Bundle.open(golden_bundle("dspark_gated", "in-place"))
    files = bundle.manifest.graphs.model_dump(exclude_none=True)
    sessions = {name: on_host(bundle.file(file)) for name, file in files.items()}
    model = DSparkInference(LoadedModel(bundle, sessions), ServingOptions(SpeculationOptions("fixed"), 1))
    stream = model.stream(PROMPTS[0], SamplingParams(max_new_tokens=20))
    next(stream)
    cuda.events.clear()
    assert len(list(stream)) > 2
    copied = {event[0]: event[1] for event in cuda.events if event[0].endswith(("Device", "Host"))}
    assert set(copied) == {"HostToDevice", "DeviceToHost"}
    cache = bundle.manifest.target.cache
    rows_of_a_layer = 4 * cache.kv_heads * 64 * cache.head_dim
    assert max(event[1] for event in cuda.events if event[0] in copied) < rows_of_a_layer
    drafter = bundle.manifest.drafter
    assert drafter is not None
    base_logits = 4 * drafter.draft_length * drafter.choices
    assert max(event[1] for event in cuda.events if event[0] == "HostToDevice") < base_logits
    assert max(event[1] for event in cuda.events if event[0] == "DeviceToHost") <= 2 * ALIGNMENT


def test_features_for_an_eagle_drafter_stay_on_the_device(
    golden_bundle: GoldenBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(golden_bundle("eagle3", "in-place"))
    files = bundle.manifest.graphs.model_dump(exclude_none=True)
    seen: set[type] = set()
    commit = Eagle3Drafter.commit

    def watched(drafter: Eagle3Drafter, slot: int, verification: Verification, *rest: Any) -> None:
        seen.add(type(verification.features))
        commit(drafter, slot, verification, *rest)

    monkeypatch.setattr(Eagle3Drafter, "commit", watched)
    expected = generate(bundle, {name: find_provider("cpu").open(bundle.file(file)) for name, file in files.items()})
    assert seen == {np.ndarray}
    seen.clear()
    assert generate(bundle, {name: on_host(bundle.file(file)) for name, file in files.items()}) == expected
    assert seen == {CudaArray}


def test_a_cache_of_a_size_that_the_target_was_compiled_for(golden_bundle: GoldenBundle) -> None:
    """It has that size from the beginning and never another."""
    bundle = Bundle.open(golden_bundle("dspark_gated", "in-place"))
    files = bundle.manifest.graphs.model_dump(exclude_none=True)
    sessions = {name: on_host(bundle.file(file)) for name, file in files.items()}
    free = generate(bundle, sessions)
    sessions["target"].limits = SessionLimits(cache_tokens=192, fixed_cache=True)
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
        session.limits = SessionLimits(cache_tokens=192, fixed_cache=True)
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
    assert [event for event in cuda.events if event[0] == "HostToDevice"] == [("HostToDevice", 256 * len(small))]
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


class Watched:
    """An ``InferenceSession`` as it is with CUDA graphs: a run with a number is the first one with it once more.

    Attributes:
        numbers: Of all runs.
        bindings: Arrays bound so far.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._first: dict[int, dict[str, int]] = {}
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs
        self.numbers: list[int] = []
        self.bindings = 0

    def io_binding(self) -> Any:
        binding, addresses = self._session.io_binding(), dict[str, int]()

        def watch(bind: Callable[..., None]) -> Callable[..., None]:
            def watched(name: str, *place: Any) -> None:
                addresses[name] = place[-1]
                self.bindings += 1
                bind(name, *place)

            return watched

        return SimpleNamespace(
            bind_input=watch(binding.bind_input),
            bind_output=watch(binding.bind_output),
            addresses=addresses,
            native=binding,
        )

    def run_with_iobinding(self, binding: Any, options: dict[str, str] | None) -> None:
        number = -1 if options is None else int(options["gpu_graph_id"])
        assert number == -1 or number > 0, "0 is ONNX Runtime's own"
        if number > 0:
            first = self._first.setdefault(number, dict(binding.addresses))
            assert binding.addresses == first, "the graph would read and write what was bound before"
        self.numbers.append(number)
        self._session.run_with_iobinding(binding.native)


class RunOptions(dict[str, str]):
    add_run_config_entry = dict.__setitem__


def watched(model: Path, monkeypatch: pytest.MonkeyPatch, *, graphs: bool) -> tuple[CudaSession, Watched]:
    monkeypatch.setattr(onnxruntime, "RunOptions", RunOptions)
    native = Watched(onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]))
    return CudaSession(model, native, memory="cpu", cuda_graphs=graphs), native


def test_arrays_are_bound_once_and_copied_at_every_run(
    tmp_path: Path, cuda: fake_cuda.FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, native = watched(in_place_graph(tmp_path), monkeypatch, graphs=False)
    new, row, total = np.zeros((1, 2, 1, 4), np.float32), np.zeros(1, np.int64), np.zeros((), np.float32)
    cache = session.device_array((1, 2, 8, 4), np.float32)
    call = session.bind({"past": cache, "new": new, "row": row}, {"present": cache, "total": total})
    cuda.events.clear()
    for value in (1, 2):
        new[:] = row[:] = value
        call.run()
    assert total == 8 * (1 + 2)
    assert native.bindings == 5
    wait = ("synchronize",)
    assert cuda.events == [("HostToDevice", 2 * 256), wait, ("DeviceToHost", 256), wait] * 2


def test_a_call_is_bound_again_when_a_larger_one_has_moved_the_staging_memory(tmp_path: Path) -> None:
    session = on_host(in_place_graph(tmp_path))

    def bound(rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32], Call]:
        new, total = np.ones((rows, 2, 8, 4), np.float32), np.zeros((), np.float32)
        cache = session.device_array(new.shape, np.float32)
        call = session.bind(
            {"past": cache, "new": new, "row": np.zeros(rows, np.int64)}, {"present": cache, "total": total}
        )
        return new, total, call

    new, total, call = bound(1)
    call.run()
    assert total == 64
    *_, larger_total, larger = bound(50)
    larger.run()
    assert larger_total == 50 * 64
    new[:] = 3
    call.run()
    assert total == 3 * 64


def test_a_call_that_repeats_gets_a_number_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, native = watched(in_place_graph(tmp_path), monkeypatch, graphs=True)

    def bound(rows: int) -> Call:
        new, cache = np.ones((rows, 2, 8, 4), np.float32), session.device_array((rows, 2, 8, 4), np.float32)
        inputs = {"past": cache, "new": new, "row": np.zeros(rows, np.int64)}
        return session.bind(inputs, {"present": cache, "total": np.zeros((), np.float32)})

    def numbers(call: Call, runs: int) -> list[int]:
        native.numbers.clear()
        for _ in range(runs):
            call.run()
        return native.numbers.copy()

    one, other = bound(1), bound(1)
    assert numbers(one, CAPTURED_AFTER + 3) == [-1] * CAPTURED_AFTER + [1] * 3
    assert numbers(other, CAPTURED_AFTER + 3) == [-1] * CAPTURED_AFTER + [2] * 3
    assert numbers(one, 2) == [1] * 2
    bound(50).run()  # moves the staging memory
    assert numbers(one, 2) == [3] * 2
    elsewhere = Thread(target=one.run)
    native.numbers.clear()
    elsewhere.start()
    elsewhere.join()
    assert native.numbers == [-1]  # the graph belongs to the thread that captured it
    monkeypatch.setattr(session, "_numbers", iter(()))
    assert numbers(bound(1), CAPTURED_AFTER + 2) == [-1] * (CAPTURED_AFTER + 2)  # none are left


@pytest.mark.parametrize("drafter", ["dspark_gated", "eagle3"])
def test_generation_with_graphs(drafter: str, golden_bundle: GoldenBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """While caches grow and requests come and go no graph is used for anything but what it was captured from."""
    bundle = Bundle.open(golden_bundle(drafter, "in-place"))
    files = {name: bundle.file(file) for name, file in bundle.manifest.graphs.model_dump(exclude_none=True).items()}
    pairs = {name: watched(file, monkeypatch, graphs=True) for name, file in files.items()}
    found = generate(bundle, {name: session for name, (session, _) in pairs.items()})
    assert found == generate(bundle, {name: on_host(file) for name, file in files.items()})
    for _, native in pairs.values():
        assert max(native.numbers) > 1


def test_graphs_are_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_onnxruntime.install(monkeypatch, built_in=("CUDAExecutionProvider",))
    opened = {value: CUDA.open(Path("m.onnx"), LoadOptions(options={ENABLE_CUDA_GRAPH: value})) for value in ("0", "1")}
    assert [vars(session)["_numbers"] is not None for session in opened.values()] == [False, True]
    with pytest.raises(ProviderError, match="enable_cuda_graph is 'yes'; it must be 0 or 1"):
        CUDA.open(Path("m.onnx"), LoadOptions(options={ENABLE_CUDA_GRAPH: "yes"}))


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
