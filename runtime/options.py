"""How a loaded bundle speculates."""

from dataclasses import dataclass
from typing import Literal, get_args

from dspark.runtime.bundle import Manifest
from dspark.runtime.errors import RequestError
from dspark.runtime.scheduler import FixedScheduler, Scheduler, ThresholdScheduler

__all__ = ["SchedulerName", "SpeculationOptions"]

SchedulerName = Literal["fixed", "threshold", "off"]
DEFAULT_THRESHOLD = 0.6


@dataclass(frozen=True)
class SpeculationOptions:
    """How to speculate.

    Attributes:
        scheduler: ``fixed`` verifies whole drafts, ``threshold`` their confident prefixes, ``off`` decodes plainly. By
            default ``threshold`` when a threshold is given, else ``fixed`` when the bundle has a drafter.
        max_draft_tokens: The most draft tokens verified a round; by default all (γ).
        confidence_threshold: Where ``threshold`` cuts, a probability; 0.6 by default.
    """

    scheduler: SchedulerName | None = None
    max_draft_tokens: int | None = None
    confidence_threshold: float | None = None

    def resolve(self, manifest: Manifest) -> tuple[Scheduler, int] | None:
        """The scheduler and the most draft tokens; None for plain decoding.

        Raises:
            RequestError: The options contradict each other or ask for what the bundle does not have.
        """
        drafter, name = manifest.drafter, self.scheduler
        threshold = DEFAULT_THRESHOLD if self.confidence_threshold is None else self.confidence_threshold
        if name not in (None, *get_args(SchedulerName)):
            raise RequestError(f"scheduler is {name!r}; there are {', '.join(get_args(SchedulerName))}")
        if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise RequestError(f"confidence_threshold is {threshold}; it is a probability from 0 to 1")
        if drafter is None:
            if name not in (None, "off"):
                raise RequestError(f"scheduler {name!r} needs a drafter, and this bundle has none; use 'off'")
            return None
        most = drafter.draft_length if self.max_draft_tokens is None else self.max_draft_tokens
        if not isinstance(most, int) or not 1 <= most <= drafter.draft_length:
            raise RequestError(f"max_draft_tokens is {most}; this drafter allows 1 to {drafter.draft_length}")
        if name is None:
            name = "fixed" if self.confidence_threshold is None else "threshold"
        if self.confidence_threshold is not None and name != "threshold":
            raise RequestError(f"confidence_threshold belongs to scheduler 'threshold', not to {name!r}")
        if name == "off":
            return None
        if name == "fixed":
            return FixedScheduler(), most
        if not manifest.has_confidence:
            raise RequestError("scheduler 'threshold' needs a confidence head, and this bundle has none; use 'fixed'")
        return ThresholdScheduler(threshold), most
