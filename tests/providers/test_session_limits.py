"""Which calls a session takes, as it states it: of engines, what they were built for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from dspark.providers import Call, CompileOptions, DeviceSession, LoadOptions, SessionLimits, find_provider, limits_of
from dspark.providers.descriptions.tensorrt import TENSORRT
from dspark.providers.engine_key import EngineKey
from dspark.providers.tensorrt.engine import TENSORRT_BACKEND
from dspark.providers.tensorrt.profiles import SymbolicShape, profiles
from dspark.providers.tensorrt.session import TensorRtSession
from tests.providers.tensorrt.graph_inputs import BLOCK, EAGLE3, HEAD, TARGET
from tests.support import fake_cuda, fake_tensorrt

TARGET_LIMITS = SessionLimits(requests=8, prompt_tokens=128, tokens_per_request=6, cache_tokens=4096)
EAGLE3_LIMITS = replace(TARGET_LIMITS, prompt_tokens=256, tokens_per_request=256)
FIXED: tuple[SymbolicShape, ...] = (("N",), ("B", "T"), ("B", 1, 1, "T", 4096), ("K",), ("B", 3, 4096, 64))


def key(ranges: Mapping[str, Mapping[str, tuple[int, int, int]]]) -> EngineKey:
    return EngineKey("", "", "", "", "", 1, ranges)


def stated(inputs: tuple[SymbolicShape, ...], limits: SessionLimits, draft_tokens: int) -> SessionLimits:
    return key(
        {
            profile.name: {symbol: (each.low, each.best, each.high) for symbol, each in profile.ranges.items()}
            for profile in profiles(inputs, limits, draft_tokens)
        }
    ).limits


@pytest.mark.parametrize(
    ("inputs", "limits"),
    [
        (TARGET, TARGET_LIMITS),
        (FIXED, replace(TARGET_LIMITS, fixed_cache=True)),
        (BLOCK, SessionLimits(requests=8, cache_tokens=4096)),
        (HEAD, SessionLimits(requests=8)),
        (EAGLE3, EAGLE3_LIMITS),
    ],
    ids=["target", "target in place", "block drafter", "head", "EAGLE-3"],
)
def test_each_kind_of_graph_states_what_was_asked_for(inputs: tuple[SymbolicShape, ...], limits: SessionLimits) -> None:
    assert stated(inputs, limits, 5) == limits


def test_what_a_graph_does_not_have_has_no_limit() -> None:
    assert stated(BLOCK, EAGLE3_LIMITS, 5) == SessionLimits(requests=8, cache_tokens=4096)
    assert stated(HEAD, EAGLE3_LIMITS, 5) == SessionLimits(requests=8)


def test_a_target_without_a_drafter_decodes_one_token_of_each_request() -> None:
    plain = replace(TARGET_LIMITS, tokens_per_request=1)
    assert stated(TARGET, plain, 0) == SessionLimits(8, 128, 1, 4096)


def test_a_target_for_one_request_takes_as_much_of_it_as_of_a_prompt() -> None:
    assert stated(TARGET, replace(TARGET_LIMITS, requests=1), 5) == SessionLimits(1, 128, 128, 4096)


def test_what_has_no_range_may_have_any_value() -> None:
    assert key({"fixed": {}}).limits == SessionLimits()
    assert key({"decode": {"S": (1, 64, 128)}}).limits == SessionLimits(cache_tokens=128)


def test_an_engine_that_is_loaded_states_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's inputs are those of an EAGLE-3 drafter."""
    fake_tensorrt.install(monkeypatch, fake_cuda.install(monkeypatch))
    graph = tmp_path / "drafter.onnx"
    graph.write_bytes(b"graph")
    TENSORRT.compile(graph, CompileOptions("fp16", limits=EAGLE3_LIMITS, draft_tokens=5))
    session = find_provider("tensorrt").open(graph)
    assert isinstance(session, DeviceSession)
    assert limits_of(session) == SessionLimits(8, 256, 256, 4096)
    file = tmp_path / "engines" / "sm90" / "drafter.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "profiles": fake_tensorrt.PROFILES}))
    assert limits_of(TensorRtSession(TENSORRT_BACKEND, graph)) == SessionLimits(4, 32, 1, 16)


def test_sessions_without_limits_take_everything(golden_bundle: Callable[[str], Path]) -> None:
    class Plain:
        """All that a third party's session has to be."""

        def bind(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> Call:
            raise NotImplementedError

    assert limits_of(Plain()) == SessionLimits()
    opened = find_provider("cpu").open(golden_bundle("qwen3_target") / "target.onnx", LoadOptions(threads=1))
    assert limits_of(opened) == SessionLimits()
