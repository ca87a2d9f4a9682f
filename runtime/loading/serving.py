"""How a loaded bundle is used: what users may say of it, and what a bundle makes of that."""

from dataclasses import dataclass

from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.engine.settings import EngineSettings
from dspark.runtime.errors import RequestError
from dspark.runtime.loading.serving_profile import ServingProfile, ShortProfile
from dspark.runtime.model.limits import MOST_REQUESTS, ModelLimits
from dspark.runtime.scheduling.options import SpeculationOptions, SpeculationPlan

__all__ = ["OFF", "ServingOptions", "ServingPlan", "check_batch_size"]

BATCH_SIZE = 8
AS_IT_IS = SpeculationOptions()
NO_PROFILE = ShortProfile()


@dataclass(frozen=True)
class ServingPlan:
    """Options that a bundle can follow.

    Attributes:
        speculation: How to speculate; None decodes plainly.
        batch_size: Requests that run at once.
        context_length: Tokens of the longest text, prompt and output together.
        settings: How the engine takes requests in.
    """

    speculation: SpeculationPlan | None
    batch_size: int
    context_length: int
    settings: EngineSettings

    @property
    def needs_costs(self) -> bool:
        """Whether the scheduler has to know what steps cost."""
        return self.speculation is not None and self.speculation.needs_costs


@dataclass(frozen=True)
class ServingOptions:
    """How a bundle is used.

    Attributes:
        speculation: How to speculate; what it leaves open, the profile decides.
        batch_size: Requests that run at once; None: the profile's number, or 8, as far as the bundle allows.
        max_sequence_length: Tokens of the longest text; None: the profile's, or the bundle's own limit.
        profile: The serving profile.
        shared: Whether requests may come from other threads than the one that computes; if not, an idle engine does
            not wait for them.
        settings: How the engine takes requests in; None: as the profile says.
    """

    speculation: SpeculationOptions = AS_IT_IS
    batch_size: int | None = None
    max_sequence_length: int | None = None
    profile: ServingProfile = NO_PROFILE
    shared: bool = True
    settings: EngineSettings | None = None

    def resolve(self, manifest: Manifest, limits: ModelLimits) -> ServingPlan:
        """What a bundle makes of the options.

        Args:
            manifest: The bundle's manifest.
            limits: What its graphs allow.

        Raises:
            RequestError: An option asks for what the bundle cannot do; the message has both.
        """
        wished = self.batch_size
        if wished is None:
            wished = min(self.profile.batch_size or BATCH_SIZE, limits.requests)
        check_batch_size(wished, limits=limits)
        settings = self.settings or self.profile.settings
        return ServingPlan(
            speculation=self.profile.options(manifest, self.speculation).resolve(manifest),
            batch_size=wished,
            context_length=self.profile.context_length(limits.context_length, self.max_sequence_length),
            settings=settings if self.shared else settings.alone,
        )


OFF = ServingOptions(SpeculationOptions("off"))
"""Plain decoding."""


def check_batch_size(batch_size: int, name: str = "batch_size", limits: ModelLimits | None = None) -> None:
    """Refuses what is no number of requests that can run at once.

    Args:
        batch_size: The number.
        name: What users call it.
        limits: What a bundle allows.

    Raises:
        RequestError: It is too small or too large.
    """
    most, reason = (MOST_REQUESTS, "") if limits is None else (limits.requests, limits.reason)
    if type(batch_size) is not int or not 1 <= batch_size <= most:
        raise RequestError(f"{name} is {batch_size!r}; it must be from 1 to {most}{reason}")
