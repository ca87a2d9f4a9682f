"""Graphs that were compiled for calls of a certain size, and graph calls that fail."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from numpy.typing import NDArray

from dspark.providers import Call, ProviderError, Session, SessionLimits
from dspark.providers.engine_key import EngineKey
from dspark.providers.tensorrt.profiles import Profile, SymbolicShape, profiles
from dspark.runtime import Bundle, DSparkInference, RequestError, SamplingParams
from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.engine.request import Request
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.loading.serving_profile import find_profile
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.model.limits import ModelLimits
from tests.support.golden_models import PROMPTS, load, whole_drafts

GoldenBundle = Callable[..., Path]
Arrays = Mapping[str, NDArray[Any]]
LONG = [(7 * index) % 120 for index in range(300)]
PARAMS = SamplingParams(max_new_tokens=24)


@dataclass
class EngineSession:
    """A graph on the CPU that takes what an engine of TensorRT would, and states the limits of the engine's key."""

    session: Session
    dimensions: Mapping[str, SymbolicShape]
    built_for: tuple[Profile, ...]
    limits: SessionLimits
    most: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session, graph: Path, limits: SessionLimits, draft_tokens: int) -> "EngineSession":
        model = onnx.load(graph, load_external_data=False)
        dimensions = {
            each.name: tuple(dim.dim_param or dim.dim_value for dim in each.type.tensor_type.shape.dim)
            for each in model.graph.input
        }
        built_for = profiles(list(dimensions.values()), limits, draft_tokens)
        ranges = {
            profile.name: {symbol: (each.low, each.best, each.high) for symbol, each in profile.ranges.items()}
            for profile in built_for
        }
        stated = EngineKey("tensorrt", "", "", "", "", 1, ranges).limits
        return cls(session, dimensions, built_for, replace(stated, fixed_cache=limits.fixed_cache))

    def bind(self, inputs: Arrays, outputs: Arrays) -> Call:
        """Refuses as ``TensorRtSession`` does."""
        for name, array in inputs.items():
            for symbol, size in zip(self.dimensions[name], array.shape, strict=True):
                self.most[str(symbol)] = max(self.most.get(str(symbol), 0), size)
        if not any(all(self._allows(profile, *each) for each in inputs.items()) for profile in self.built_for):
            raise ProviderError(f"no profile allows { ({name: array.shape for name, array in inputs.items()}) }")
        return self.session.bind(inputs, outputs)

    def _allows(self, profile: Profile, name: str, array: NDArray[Any]) -> bool:
        low, _, high = profile.shapes(self.dimensions[name])
        return all(a <= size <= b for a, size, b in zip(low, array.shape, high, strict=True))


def compiled(path: Path, limits: SessionLimits) -> tuple[LoadedModel, dict[str, EngineSession]]:
    """A bundle over engines that were built for these calls."""
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    drafted = manifest.drafter.draft_length if manifest.drafter else 0
    opened = open_sessions(bundle, HostOptions(threads=1), list(manifest.precision))
    engines = {}
    for name, session in opened.items():
        fixed = name == "target" and manifest.cache_form == "in-place"
        tokens = limits.prompt_tokens if name != "target" else 1 + drafted
        asked = replace(limits, fixed_cache=fixed, tokens_per_request=tokens)
        engines[name] = EngineSession.of(session, bundle.graph(name), asked, drafted)
    return LoadedModel(bundle, engines), engines


def use(bundle: Path, **options: Any) -> ServingOptions:
    return ServingOptions(whole_drafts(Bundle.open(bundle)), profile=find_profile("pro"), shared=False, **options)


EIGHT = SessionLimits(requests=8, prompt_tokens=128, cache_tokens=512)


@pytest.mark.parametrize("cache_form", ["in-place", "delta"])
@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3", "qwen3_target"])
def test_a_profile_that_asks_for_more_than_was_compiled(
    name: str, cache_form: str, golden_bundle: GoldenBundle
) -> None:
    """``pro`` computes prompts 256 tokens at a time, 64 requests at once; these engines take 128 and 8."""
    bundle = golden_bundle(name, cache_form)
    prompts = [LONG, *PROMPTS * 3, LONG[::-1]]
    expected = [done.token_ids for done in load(bundle).generate(prompts, PARAMS)]
    loaded, engines = compiled(bundle, EIGHT)
    done = DSparkInference(loaded, use(bundle)).generate(prompts, PARAMS)
    assert [each.error for each in done] == [None] * len(prompts)
    assert [each.token_ids for each in done] == expected
    assert engines["target"].most["B"] == 8
    assert engines["target"].most["T"] == 128


def test_more_requests_than_were_compiled_for_are_refused(golden_bundle: GoldenBundle) -> None:
    bundle = golden_bundle("dspark_vanilla")
    loaded, _ = compiled(bundle, EIGHT)
    assert loaded.plan(use(bundle)).batch_size == 8
    with pytest.raises(
        RequestError, match="batch_size is 9; it must be from 1 to 8, which the bundle's compiled graphs are for"
    ):
        DSparkInference(loaded, use(bundle, batch_size=9))


def test_the_smallest_engine_of_a_bundle_counts(golden_bundle: GoldenBundle) -> None:
    bundle = golden_bundle("dspark_vanilla")
    loaded, engines = compiled(bundle, EIGHT)
    engines["head"].limits = SessionLimits(requests=3)
    assert loaded.limits.requests == 3
    done = DSparkInference(loaded, use(bundle)).generate(PROMPTS, PARAMS)
    assert [each.error for each in done] == [None] * len(PROMPTS)
    assert engines["head"].most["B"] == engines["target"].most["B"] == 3


@pytest.mark.parametrize("cache_form", ["in-place", "delta"])
def test_texts_are_as_long_as_was_compiled_for(cache_form: str, golden_bundle: GoldenBundle) -> None:
    bundle = golden_bundle("dspark_vanilla", cache_form)
    loaded, engines = compiled(bundle, replace(EIGHT, cache_tokens=192))
    model = DSparkInference(loaded, use(bundle))
    drafted = loaded.bundle.manifest.drafter.draft_length  # type: ignore[union-attr]
    assert model.context_length == 192 - drafted
    prompt = LONG[: model.context_length - 24]
    (done,) = model.generate([prompt], PARAMS)
    assert (done.error, len(done.token_ids)) == (None, 24)
    assert engines["target"].most["S"] == 192
    with pytest.raises(RequestError, match=f"make {model.context_length + 1}; the limit is {model.context_length}"):
        model.generate([[*prompt, 1]], PARAMS)


def test_an_eagle_drafter_takes_committed_tokens_as_it_was_compiled_for(golden_bundle: GoldenBundle) -> None:
    bundle = golden_bundle("eagle3")
    (expected,) = load(bundle).generate([LONG], PARAMS)
    loaded, engines = compiled(bundle, replace(EIGHT, prompt_tokens=16))
    (done,) = DSparkInference(loaded, use(bundle)).generate([LONG], PARAMS)
    assert (done.error, done.token_ids) == (None, expected.token_ids)
    assert engines["drafter"].most["T"] == engines["target"].most["T"] == 16


def test_a_cache_grows_to_what_was_compiled_for_and_no_further() -> None:
    from dspark.runtime.bundle.manifest import CacheInfo

    cache = KeyValueCache([CacheInfo(layers=1, kv_heads=1, head_dim=2)], 2, most=320)
    for tokens in (60, 250, 300, 320):  # an eighth more each time would end at 384
        cache.reserve(tokens)
        assert tokens <= cache.capacity <= 320


def test_limits_of_what_states_none(golden_bundle: GoldenBundle) -> None:
    manifest = Bundle.open(golden_bundle("dspark_vanilla")).manifest
    limits = ModelLimits.of(manifest, {})
    assert (limits.requests, limits.draft_tokens, limits.context_length) == (1024, None, manifest.context_length)


# --- graph calls that fail ---


@dataclass
class FailingSession:
    """A graph whose calls of several tokens fail from some call on."""

    session: Session
    error: Exception
    working: int

    def bind(self, inputs: Arrays, outputs: Arrays) -> Call:
        return _FailingCall(self, self.session.bind(inputs, outputs))


@dataclass
class _FailingCall:
    session: FailingSession
    call: Call

    def run(self) -> None:
        self.session.working -= 1
        if self.session.working < 0:
            raise self.session.error
        self.call.run()


@pytest.mark.parametrize("error", [RuntimeError("device lost"), ProviderError("the engine cannot be run")], ids=repr)
@pytest.mark.parametrize(("name", "graph"), [("dspark_gated", "target"), ("dspark_gated", "drafter")])
@pytest.mark.parametrize("cache_form", ["in-place", "delta"])
def test_a_call_that_fails_ends_the_requests_it_was_for(
    cache_form: str, name: str, graph: str, error: Exception, golden_bundle: GoldenBundle
) -> None:
    """Whatever a library raises; the engine goes on with others, whose texts are as if nothing had happened."""
    bundle = golden_bundle(name, cache_form)
    (expected,) = load(bundle).generate([PROMPTS[0]], PARAMS)
    opened = Bundle.open(bundle)
    sessions: dict[str, Session] = dict(open_sessions(opened, HostOptions(threads=1), list(opened.manifest.precision)))
    failing = FailingSession(sessions[graph], error, working=6)
    sessions[graph] = failing
    model = DSparkInference(LoadedModel(opened, sessions), ServingOptions(whole_drafts(opened), batch_size=3))
    for done in model.generate(PROMPTS[:3], PARAMS):
        assert done.finish_reason == "error"
        assert 0 < len(done.token_ids) < 24
        told = str(error) if isinstance(error, ProviderError) else f"a graph call failed: RuntimeError: {error}"
        assert done.error == told
    assert model.engine.idle
    failing.working = 10_000
    (again,) = model.generate([PROMPTS[0]], PARAMS)
    assert (again.error, again.token_ids) == (None, expected.token_ids)


def test_a_prompt_that_fails_leaves_the_running_requests_alone(golden_bundle: GoldenBundle) -> None:
    bundle = golden_bundle("dspark_gated")
    (expected,) = load(bundle).generate([PROMPTS[0]], PARAMS)
    opened = Bundle.open(bundle)
    sessions: dict[str, Session] = dict(open_sessions(opened, HostOptions(threads=1), list(opened.manifest.precision)))
    failing = FailingSession(sessions["target"], MemoryError("full"), working=10_000)
    sessions["target"] = failing
    model = DSparkInference(LoadedModel(opened, sessions), ServingOptions(whole_drafts(opened), batch_size=2))
    first, second = (model.request(prompt, PARAMS) for prompt in PROMPTS[:2])
    model.engine.submit(first)
    model.engine.step()
    model.engine.submit(second)
    failing.working = 0
    _step_with_one_failure(model, failing)
    assert second.finish_reason == "error"
    assert "full" in str(second.failure)
    while first.finish_reason is None:
        model.engine.step()
    assert (first.failure, first.output_ids) == (None, expected.token_ids)


def _step_with_one_failure(model: DSparkInference, failing: FailingSession) -> None:
    """One step in which only the first call fails: the prompt's."""
    call = _FailingCall.run

    def once(self: _FailingCall) -> None:
        try:
            call(self)
        finally:
            failing.working = 10_000

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_FailingCall, "run", once)
        model.engine.step()


# --- the end of a model ---


def test_a_closed_model_ends_its_requests_and_takes_no_more(golden_bundle: GoldenBundle) -> None:
    requests: list[Request] = []
    long = SamplingParams(max_new_tokens=200)
    with load(golden_bundle("dspark_vanilla"), batch_size=2) as model:
        engine = model.engine
        for prompt in PROMPTS[:3]:  # two run, one waits
            requests.append(model.request(prompt, long))
        stream = model.follow(requests[0])
        streamed = next(stream).token_ids
        for request in requests[1:]:
            engine.submit(request)
        engine.step()
    assert [request.finish_reason for request in requests] == ["cancelled"] * 3
    assert streamed + [token for chunk in stream for token in chunk.token_ids] == requests[0].output_ids
    with pytest.raises(RequestError, match="the model was closed"):
        model.generate(PROMPTS[:1])
    with pytest.raises(RequestError, match="the model was closed"):
        engine.submit(requests[0])
    model.close()
