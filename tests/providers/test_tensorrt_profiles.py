"""Which shapes engines are built for."""

import itertools

import pytest

from dspark.providers.tensorrt.profiles import Dimensions, Limits, Profile, Range, profiles

LIMITS = Limits(batch=4, draft_tokens=5, chunk=128, extension=256, capacity=4096)
TARGET: tuple[Dimensions, ...] = (
    ("N",), ("B", "T"), ("B", 1, 1, "T", "S+T"), ("K",), ("B", 3, "S", 64),
)  # fmt: skip
BLOCK: tuple[Dimensions, ...] = (("B",), ("B", 1, 1, 1, "S"), ("B", 3, "S", 64))
HEAD: tuple[Dimensions, ...] = (("B", 5, 64), ("B",))
EAGLE3: tuple[Dimensions, ...] = (("B", "T"), ("B", "T", 64), ("B", 1, 1, "T", "S+T"), ("B", 3, "S", 64), ("B", 5))


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
def test_a_graph_has_the_profiles_of_its_kind(inputs: tuple[Dimensions, ...], names: list[str]) -> None:
    found = profiles(inputs, LIMITS)
    assert [profile.name for profile in found] == names
    for profile, dimensions in itertools.product(found, inputs):
        for low, best, high in zip(*profile.shapes(dimensions), strict=True):
            assert 1 <= low <= best <= high


def test_without_a_drafter_nothing_is_verified() -> None:
    limits = Limits(batch=4, draft_tokens=0, chunk=128, extension=256, capacity=4096)
    assert [profile.name for profile in profiles(TARGET, limits)] == ["decode", "prefill"]


def test_every_step_of_the_engine_has_a_profile() -> None:
    """All that ``Target`` may ask for: any lengths of any number of requests, chunks of a prompt, pieces of a text."""
    decode, verify, prefill = profiles(TARGET, LIMITS)
    for capacity in (1, 64, 4096):
        for requests in range(1, LIMITS.batch + 1):
            for total in range(requests, requests * (1 + LIMITS.draft_tokens) + 1):
                widest = min(1 + LIMITS.draft_tokens, total - requests + 1)
                for width in range(-(-total // requests), widest + 1):
                    profile = decode if width == 1 else verify
                    assert allows(profile, B=requests, T=width, N=total, K=total, S=capacity)
        for tokens, scored in itertools.product((1, 2, LIMITS.chunk), (1, None)):
            assert allows(prefill, B=1, T=tokens, N=tokens, K=scored or tokens, S=capacity)
    assert not allows(verify, B=LIMITS.batch + 1)
    assert not allows(verify, T=2 + LIMITS.draft_tokens)
    assert not allows(decode, T=2)
    assert not allows(prefill, S=LIMITS.capacity + 1)


def test_an_eagle3_drafter_takes_whole_rounds_and_long_prompts() -> None:
    draft, extension = profiles(EAGLE3, LIMITS)
    assert allows(draft, B=4, T=6, S=4096)
    assert not allows(draft, T=7)
    assert allows(extension, B=4, T=256, S=4096)


def test_a_target_whose_cache_is_fixed() -> None:
    """All of its profiles say so, which is where the runtime learns of it."""
    inputs: tuple[Dimensions, ...] = (("N",), ("B", "T"), ("B", 1, 1, "T", 4096), ("K",), ("B", 3, 4096, 64))
    for profile in profiles(inputs, LIMITS):
        assert profile.ranges["S"] == Range(4096, 4096, 4096)
        assert profile.shapes(inputs[-1])[0][2] == 4096


def test_a_cache_smaller_than_what_is_best() -> None:
    small = Limits(batch=1, draft_tokens=1, chunk=16, extension=16, capacity=64)
    assert profiles(BLOCK, small)[0].ranges["S"] == Range(1, 64, 64)
