"""Which shapes engines are built for."""

import itertools
from dataclasses import replace

import pytest

from dspark.providers import ProviderError, SessionLimits
from dspark.providers.tensorrt.profiles import Profile, Range, SymbolicShape, profiles
from tests.providers.tensorrt.graph_inputs import BLOCK, EAGLE3, HEAD, TARGET

DRAFTED = 5
LIMITS = SessionLimits(requests=4, prompt_tokens=128, tokens_per_request=1 + DRAFTED, cache_tokens=4096)
EXTENSION = replace(LIMITS, prompt_tokens=256, tokens_per_request=256)


def allows(profile: Profile, **values: int) -> bool:
    return all(profile.ranges[symbol].low <= value <= profile.ranges[symbol].high for symbol, value in values.items())


def test_shapes_of_an_input() -> None:
    profile = Profile("any", {"B": Range(1, 2, 3), "T": Range(1, 4, 8), "S": Range(10, 20, 30)})
    assert profile.shapes(("B", 1, 1, "T", "S+T")) == ((1, 1, 1, 1, 11), (2, 1, 1, 4, 24), (3, 1, 1, 8, 38))


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (TARGET, ["decode", "verify", "prefill"]),
        (BLOCK, ["draft"]),
        (HEAD, ["draft"]),
        (EAGLE3, ["draft", "extension"]),
    ],
)
def test_a_graph_has_the_profiles_of_its_kind(inputs: tuple[SymbolicShape, ...], names: list[str]) -> None:
    found = profiles(inputs, LIMITS, DRAFTED)
    assert [profile.name for profile in found] == names
    for profile, dimensions in itertools.product(found, inputs):
        for low, best, high in zip(*profile.shapes(dimensions), strict=True):
            assert 1 <= low <= best <= high


def test_without_a_drafter_nothing_is_verified() -> None:
    limits = replace(LIMITS, tokens_per_request=1)
    assert [profile.name for profile in profiles(TARGET, limits, 0)] == ["decode", "prefill"]


def test_every_step_of_the_engine_has_a_profile() -> None:
    """All that ``Target`` may ask for: any lengths of any number of requests, chunks of a prompt, pieces of a text."""
    decode, verify, prefill = profiles(TARGET, LIMITS, DRAFTED)
    most, chunk = 4, 128
    for capacity in (1, 64, 4096):
        for requests in range(1, most + 1):
            for total in range(requests, requests * (1 + DRAFTED) + 1):
                widest = min(1 + DRAFTED, total - requests + 1)
                for width in range(-(-total // requests), widest + 1):
                    profile = decode if width == 1 else verify
                    assert allows(profile, B=requests, T=width, N=total, K=total, S=capacity)
        for tokens, scored in itertools.product((1, 2, chunk), (1, None)):
            assert allows(prefill, B=1, T=tokens, N=tokens, K=scored or tokens, S=capacity)
    assert not allows(verify, B=most + 1)
    assert not allows(verify, T=2 + DRAFTED)
    assert not allows(decode, T=2)
    assert not allows(prefill, S=4097)


def test_an_eagle3_drafter_takes_whole_rounds_and_long_prompts() -> None:
    draft, extension = profiles(EAGLE3, EXTENSION, DRAFTED)
    assert allows(draft, B=4, T=6, S=4096)
    assert not allows(draft, T=7)
    assert allows(extension, B=4, T=256, S=4096)


def test_a_target_whose_cache_is_fixed() -> None:
    """All of its profiles say so, which is where the runtime learns of it."""
    inputs: tuple[SymbolicShape, ...] = (("N",), ("B", "T"), ("B", 1, 1, "T", 4096), ("K",), ("B", 3, 4096, 64))
    for profile in profiles(inputs, LIMITS, DRAFTED):
        assert profile.ranges["S"] == Range(4096, 4096, 4096)
        assert profile.shapes(inputs[-1])[0][2] == 4096


def test_a_cache_smaller_than_what_is_best() -> None:
    small = SessionLimits(requests=1, cache_tokens=64)
    assert profiles(BLOCK, small, 1)[0].ranges["S"] == Range(1, 64, 64)


@pytest.mark.parametrize("name", ["requests", "prompt_tokens", "tokens_per_request", "cache_tokens"])
def test_a_limit_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ProviderError, match=f"an engine is built for calls of limited size; {name} has no limit"):
        profiles(TARGET, replace(LIMITS, **{name: None}), DRAFTED)
    assert profiles(HEAD, SessionLimits(requests=4), DRAFTED)[0].ranges == {"B": Range(1, 1, 4)}
