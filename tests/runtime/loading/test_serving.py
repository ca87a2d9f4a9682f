"""Serving options: what a bundle makes of them, and what it cannot follow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.runtime import Bundle, RequestError, SpeculationOptions
from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.engine.settings import EngineSettings
from dspark.runtime.loading.serving import OFF, ServingOptions, check_batch_size
from dspark.runtime.loading.serving_profile import FullProfile, Scheduling, ShortProfile
from dspark.runtime.model.limits import ModelLimits

ANY = ModelLimits(requests=1024, draft_tokens=None, context_length=512)
SMALL = ModelLimits(requests=3, draft_tokens=None, context_length=100, reason=", which the bundle's engines are for")


@pytest.fixture
def manifest(golden_bundle: Callable[[str], Path]) -> Manifest:
    return Bundle.open(golden_bundle("dspark_vanilla")).manifest


@pytest.mark.parametrize(
    ("given", "of_profile", "limits", "expected"),
    [(None, None, ANY, 8), (None, None, SMALL, 3), (None, 20, ANY, 20), (None, 20, SMALL, 3), (2, 20, ANY, 2)],
)
def test_the_batch_is_what_is_given_then_the_profiles_as_far_as_graphs_allow(
    given: int | None, of_profile: int | None, limits: ModelLimits, expected: int, manifest: Manifest
) -> None:
    profile = ShortProfile() if of_profile is None else FullProfile(scheduling=Scheduling(max_batch_size=of_profile))
    assert ServingOptions(batch_size=given, profile=profile).resolve(manifest, limits).batch_size == expected


def test_a_batch_that_is_asked_for_is_never_cut(manifest: Manifest) -> None:
    with pytest.raises(RequestError, match=r"^batch_size is 4; it must be from 1 to 3, which the bundle's engines are"):
        ServingOptions(batch_size=4).resolve(manifest, SMALL)


@pytest.mark.parametrize("value", [0, -1, 1025, 2.0, True, "4"])
def test_what_is_no_batch_is_refused_under_the_name_that_users_know(value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        check_batch_size(value, "--concurrency")
    assert str(raised.value) == f"--concurrency is {value!r}; it must be from 1 to 1024"


def test_the_context_may_be_shorter_than_the_bundles_and_no_longer(manifest: Manifest) -> None:
    profile = ShortProfile(max_sequence_len=200)
    assert ServingOptions().resolve(manifest, ANY).context_length == 512
    assert ServingOptions(profile=profile).resolve(manifest, ANY).context_length == 200
    assert ServingOptions(profile=profile, max_sequence_length=90).resolve(manifest, ANY).context_length == 90
    with pytest.raises(RequestError, match="max_sequence_len is 200; this bundle allows 2 to 100"):
        ServingOptions(profile=profile).resolve(manifest, SMALL)


def test_nobody_waits_for_a_batch_that_only_one_thread_fills(manifest: Manifest) -> None:
    settings = EngineSettings(min_batch_size=4, max_queue_delay=1.0, cache_tokens=50)
    shared = ServingOptions(settings=settings).resolve(manifest, ANY).settings
    alone = ServingOptions(settings=settings, shared=False).resolve(manifest, ANY).settings
    assert shared == settings
    assert (alone.min_batch_size, alone.cache_tokens) == (1, 50)


def test_only_hardware_schedulers_need_costs(manifest: Manifest) -> None:
    needed = {
        name: ServingOptions(SpeculationOptions(name)).resolve(manifest, ANY).needs_costs
        for name in ("hardware", "hardware-async", "fixed", "threshold", "off")
    }
    assert needed == {"hardware": True, "hardware-async": True, "fixed": False, "threshold": False, "off": False}
    assert OFF.resolve(manifest, ANY).speculation is None
