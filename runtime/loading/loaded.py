"""A bundle in memory: opens it once, and makes as many engines over its graphs as are wanted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.providers.session import Session
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.calibration import Calibration, read_calibration
from dspark.runtime.costs.table import CostTable
from dspark.runtime.engine.engine import Engine
from dspark.runtime.engine.round import Speculation
from dspark.runtime.errors import RequestError
from dspark.runtime.loading.costs import find_costs
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.serving import ServingOptions, ServingPlan
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.graphs import ModelGraphs
from dspark.runtime.model.limits import ModelLimits

__all__ = ["LoadedModel"]

ON_THIS_HOST = HostOptions()


@dataclass(frozen=True)
class LoadedModel:
    """A bundle and its loaded graphs.

    Attributes:
        bundle: The bundle.
        sessions: Its graphs by name; only the target's if nobody drafts.
        calibration: Temperatures of its confidences; None if it has none.
        host: What runs the graphs.
    """

    bundle: Bundle
    sessions: Mapping[str, Session]
    calibration: Calibration | None = None
    host: HostOptions = ON_THIS_HOST

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        host: HostOptions,
        uses: Sequence[ServingOptions],
        check_hashes: bool | None = None,
    ) -> "LoadedModel":
        """Loads the graphs that some uses of a bundle need.

        Args:
            bundle: The bundle.
            host: What runs its graphs.
            uses: How it will be used; what the manifest does not allow is refused before any graph is loaded.
            check_hashes: See ``Bundle.open``.

        Raises:
            BundleError: The bundle or its calibration is damaged.
            ProviderError: No provider can run a graph.
            RequestError: An option does not fit the bundle.
        """
        manifest = bundle.manifest
        try:
            plans = [use.resolve(manifest, ModelLimits.of(manifest)) for use in uses]
        except RequestError as error:
            raise RequestError(f"{bundle.path}: {error}") from error
        names = list(manifest.precision) if any(plan.speculation for plan in plans) else ["target"]
        calibration = read_calibration(bundle)
        return cls(bundle, open_sessions(bundle, host, names, check_hashes), calibration, host)

    @property
    def limits(self) -> ModelLimits:
        """What the loaded graphs allow."""
        return ModelLimits.of(self.bundle.manifest, self.sessions)

    def plan(self, use: ServingOptions) -> ServingPlan:
        """What the loaded graphs make of a use.

        Raises:
            RequestError: They do not allow it.
        """
        return use.resolve(self.bundle.manifest, self.limits)

    def costs(self, plans: Sequence[ServingPlan], notify: Callable[[str], None]) -> CostTable | None:
        """What steps cost here, measured now if nobody has; None if no plan asks.

        Args:
            plans: The plans, which share one table.
            notify: Told in a line when something is measured, and why.
        """
        asking = [plan for plan in plans if plan.needs_costs]
        if not asking:
            return None
        requests = max(plan.batch_size for plan in asking)
        plan = asking[0].speculation
        return find_costs(plan, self.bundle, self.host, requests, lambda: self.sessions, notify)

    def engine(self, plan: ServingPlan, clock: PhaseClock, costs: CostTable | None = None) -> Engine:
        """An engine with a cache of its own.

        Args:
            plan: What ``plan`` returned.
            clock: Tells where its time goes.
            costs: What steps cost, if the plan's scheduler has to know.

        Raises:
            RequestError: The scheduler lacks the costs.
        """
        speculation = plan.speculation
        sessions = self.sessions if speculation else {"target": self.sessions["target"]}
        graphs = ModelGraphs.of(self.bundle, sessions, plan.batch_size, clock)
        if speculation is None or graphs.drafter is None:
            return Engine(graphs.target, graphs.cache, None, plan.batch_size, clock, plan.settings)
        length = speculation.draft_length
        temperatures = np.ones(length) if self.calibration is None else self.calibration.temperatures
        most, allowed = speculation.max_draft_tokens, self.limits.draft_tokens
        drafts = Speculation(
            drafter=graphs.drafter,
            scheduler=speculation.make_scheduler(costs),
            max_draft_tokens=most if allowed is None else min(most, allowed),
            draft_length=length,
            confidence_temperatures=np.asarray(temperatures, np.float32),
        )
        return Engine(graphs.target, graphs.cache, drafts, plan.batch_size, clock, plan.settings)
