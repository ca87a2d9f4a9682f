"""Speculation options: the scheduler that a bundle gets, and what it cannot follow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.runtime import Bundle, DSparkInference, RequestError, SpeculationOptions
from dspark.runtime.bundle.manifest import Manifest, StaticShapes
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.scheduling.hardware import AsyncHardwareScheduler, HardwareScheduler
from dspark.runtime.scheduling.scheduler import FixedScheduler, Scheduler, ThresholdScheduler
from tests.support.costs import cost_table

GoldenBundle = Callable[[str], Path]


def manifest_of(bundle: Path, *, fixed: bool = False) -> Manifest:
    manifest = Bundle.open(bundle).manifest
    shapes = StaticShapes(batch=2, block=6, chunk=32, capacities=(64,)) if fixed else None
    return manifest.model_copy(update={"shapes": shapes})


@pytest.mark.parametrize(
    ("name", "fixed", "options", "expected"),
    [
        ("dspark_vanilla", False, {}, "hardware"),
        ("eagle3", False, {}, "hardware"),
        ("dspark_vanilla", True, {}, "fixed"),
        ("dspark_vanilla", False, {"confidence_threshold": 0.3}, "threshold"),
        ("dspark_vanilla", True, {"confidence_threshold": 0.3}, "threshold"),
        ("dspark_vanilla", True, {"scheduler": "threshold"}, "threshold"),
        ("dspark_vanilla", False, {"scheduler": "off"}, None),
        ("qwen3_target", False, {}, None),
        ("qwen3_target", True, {"scheduler": "off"}, None),
    ],
)
def test_the_scheduler_of_a_bundle(
    name: str, fixed: bool, options: dict[str, Any], expected: str | None, golden_bundle: GoldenBundle
) -> None:
    plan = SpeculationOptions(**options).resolve(manifest_of(golden_bundle(name), fixed=fixed))
    assert (None if plan is None else plan.scheduler) == expected
    if plan is not None:
        assert (plan.max_draft_tokens, plan.draft_length) == (5, 5)
        assert plan.confidence_threshold == options.get("confidence_threshold", 0.6)


@pytest.mark.parametrize("scheduler", ["hardware", "hardware-async"])
def test_fixed_shapes_leave_nothing_to_weigh(scheduler: Any, golden_bundle: GoldenBundle) -> None:
    manifest = manifest_of(golden_bundle("dspark_vanilla"), fixed=True)
    with pytest.raises(RequestError, match=f"scheduler '{scheduler}' needs steps whose cost .* fixed; leave"):
        SpeculationOptions(scheduler).resolve(manifest)


@pytest.mark.parametrize(
    ("scheduler", "kind"),
    [
        ("fixed", FixedScheduler),
        ("threshold", ThresholdScheduler),
        ("hardware", HardwareScheduler),
        ("hardware-async", AsyncHardwareScheduler),
    ],
)
def test_a_plan_makes_its_scheduler(scheduler: Any, kind: type[Scheduler], golden_bundle: GoldenBundle) -> None:
    plan = SpeculationOptions(scheduler).resolve(manifest_of(golden_bundle("dspark_vanilla")))
    assert plan is not None
    assert type(plan.make_scheduler(cost_table())) is kind
    assert plan.needs_costs == scheduler.startswith("hardware")
    if plan.needs_costs:
        with pytest.raises(RequestError, match=f"scheduler '{scheduler}' needs the costs of steps"):
            plan.make_scheduler(None)


def test_costs_must_be_given(golden_bundle: GoldenBundle) -> None:
    bundle = Bundle.open(golden_bundle("dspark_vanilla"))
    sessions = open_sessions(bundle, HostOptions(threads=1), list(bundle.manifest.precision))
    with pytest.raises(RequestError, match="scheduler 'hardware' needs the costs of steps"):
        DSparkInference(LoadedModel(bundle, sessions))
