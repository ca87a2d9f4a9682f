"""The table of costs for this bundle on this device: the one that was measured, or a brief measurement now."""

from collections.abc import Callable, Mapping

from dspark.providers import Session
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.costs.measure import brief_grid, measure
from dspark.runtime.costs.store import cost_file, cost_key, read_costs, write_costs
from dspark.runtime.costs.table import CostTable
from dspark.runtime.errors import BundleError
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.scheduling.options import SpeculationPlan

__all__ = ["find_costs"]


def find_costs(
    plan: SpeculationPlan | None,
    bundle: Bundle,
    host: HostOptions,
    requests: int,
    graphs: Callable[[], Mapping[str, Session]],
    notify: Callable[[str], None],
) -> CostTable | None:
    """The table that was measured for this bundle on this device, or else one that is measured now and kept.

    Args:
        plan: How to speculate; None is returned for one whose scheduler does not ask what steps cost.
        bundle: The bundle.
        host: What runs its graphs.
        requests: Requests that run at once at most.
        graphs: Gives its graphs, if they are needed.
        notify: Told why it takes longer, and why a table could not be used or kept.
    """
    if plan is None or not plan.needs_costs:
        return None
    key = cost_key(bundle, host.selection, host.threads)
    found, problems = [], []
    for brief in (False, True):
        try:
            table = read_costs(bundle, key, brief=brief)
        except BundleError as error:
            problems.append(f"{error}; measuring anew")
            continue
        if table is not None and table.max_requests >= requests:
            return table
        if table is not None:
            found.append(table)
    for problem in problems:
        notify(problem)
    if found:
        largest = max(found, key=lambda table: table.max_requests)
        notify(
            f"{cost_file(bundle, key, brief=largest.brief)}: was measured with {largest.max_requests} requests at "
            f"most; there can be {requests}; measuring briefly for now (dspark-run profile --max-requests {requests} "
            "does for good)"
        )
    else:
        notify(f"Measuring briefly what steps cost on this device: {cost_file(bundle, key, brief=True)}")
    measured = measure(bundle, graphs(), brief_grid(requests, plan.draft_length)).table(key, brief=True)
    try:
        write_costs(bundle, measured)
    except OSError as error:
        notify(f"The measurement cannot be kept: {error}")
    return measured
