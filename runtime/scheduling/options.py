"""How a loaded bundle speculates."""

from dataclasses import dataclass
from typing import get_args

from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.costs.model import CostModel
from dspark.runtime.costs.table import CostTable
from dspark.runtime.errors import RequestError
from dspark.runtime.scheduling.hardware import AsyncHardwareScheduler, HardwareScheduler
from dspark.runtime.scheduling.names import SchedulerName
from dspark.runtime.scheduling.rates import AcceptanceRates
from dspark.runtime.scheduling.scheduler import FixedScheduler, Scheduler, ThresholdScheduler

__all__ = ["SchedulerName", "SpeculationOptions", "SpeculationPlan"]

DEFAULT_THRESHOLD = 0.6
LEAVE_OUT = "leave the scheduler (--scheduler) out, which works with every bundle"


@dataclass(frozen=True)
class SpeculationPlan:
    """Options that a bundle can follow.

    Attributes:
        scheduler: Name of the scheduler; never ``off``.
        max_draft_tokens: The most draft tokens verified per round.
        confidence_threshold: Where ``threshold`` cuts.
        draft_length: γ.
        has_confidence: Whether the drafter rates its tokens.
    """

    scheduler: SchedulerName
    max_draft_tokens: int
    confidence_threshold: float
    draft_length: int
    has_confidence: bool

    @property
    def needs_costs(self) -> bool:
        """Whether the scheduler has to know what steps cost."""
        return self.scheduler in ("hardware", "hardware-async")

    def make_scheduler(self, costs: CostTable | None) -> Scheduler:
        """The scheduler, for one engine.

        Args:
            costs: What steps cost; needed if ``needs_costs``.
        """
        if self.scheduler == "fixed":
            return FixedScheduler()
        if self.scheduler == "threshold":
            return ThresholdScheduler(self.confidence_threshold)
        if costs is None:
            raise RequestError(
                f"scheduler {self.scheduler!r} needs the costs of steps; see dspark.runtime.costs.measure"
            )
        rates = None if self.has_confidence else AcceptanceRates(self.draft_length)
        kind = HardwareScheduler if self.scheduler == "hardware" else AsyncHardwareScheduler
        return kind(CostModel(costs), rates)


@dataclass(frozen=True)
class SpeculationOptions:
    """How to speculate.

    Attributes:
        scheduler: ``hardware`` verifies what promises most tokens per second on this device and does not draft where
            that loses, ``hardware-async`` does so with a budget from earlier rounds, ``fixed`` verifies whole drafts,
            ``threshold`` their confident prefixes, ``off`` decodes plainly. By default ``threshold`` when a threshold
            is given, else ``hardware`` when the bundle has a drafter, or
            ``fixed`` if its shapes are fixed.
        max_draft_tokens: The most draft tokens verified per round; by default all (γ).
        confidence_threshold: Where ``threshold`` cuts, a probability; 0.6 by default.
    """

    scheduler: SchedulerName | None = None
    max_draft_tokens: int | None = None
    confidence_threshold: float | None = None

    def resolve(self, manifest: Manifest) -> SpeculationPlan | None:
        """What a bundle makes of the options; None for plain decoding.

        Raises:
            RequestError: The options contradict each other or ask for what the bundle does not have.
        """
        drafter, name = manifest.drafter, self.scheduler
        threshold = DEFAULT_THRESHOLD if self.confidence_threshold is None else self.confidence_threshold
        if name not in (None, *get_args(SchedulerName)):
            raise RequestError(f"scheduler is {name!r}; there are {', '.join(get_args(SchedulerName))}")
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise RequestError(f"confidence_threshold is {threshold}; it is a probability from 0 to 1")
        if drafter is None:
            if name not in (None, "off"):
                raise RequestError(f"scheduler {name!r} needs a drafter, and this bundle has none; {LEAVE_OUT}")
            for option in ("max_draft_tokens", "confidence_threshold"):
                if getattr(self, option) is not None:
                    raise RequestError(f"{option} needs a drafter, and this bundle has none; leave it out")
            return None
        most = drafter.draft_length if self.max_draft_tokens is None else self.max_draft_tokens
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= drafter.draft_length:
            raise RequestError(f"max_draft_tokens is {most}; this drafter allows 1 to {drafter.draft_length}")
        if name is None:
            name = "hardware" if manifest.shapes is None else "fixed"
            name = name if self.confidence_threshold is None else "threshold"
        if manifest.shapes is not None and name.startswith("hardware"):
            raise RequestError(
                f"scheduler {name!r} needs steps whose cost depends on their tokens, and this bundle's shapes are "
                f"fixed; {LEAVE_OUT}"
            )
        if self.confidence_threshold is not None and name != "threshold":
            raise RequestError(f"confidence_threshold belongs to scheduler 'threshold', not to {name!r}")
        if name == "off":
            if self.max_draft_tokens is not None:
                raise RequestError("max_draft_tokens does not go with scheduler 'off', which drafts nothing")
            return None
        if name == "threshold" and not manifest.has_confidence:
            raise RequestError(f"scheduler 'threshold' needs a confidence head, and this bundle has none; {LEAVE_OUT}")
        return SpeculationPlan(name, most, threshold, drafter.draft_length, manifest.has_confidence)
