"""The table of costs for this bundle on this device: the one that was measured, or a brief measurement now."""

from collections.abc import Callable, Mapping

from dspark.providers import Provider, Selection, Session
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.costs.measure import brief_grid, measure
from dspark.runtime.costs.store import cost_file, cost_key, read_costs, write_costs
from dspark.runtime.costs.table import CostTable
from dspark.runtime.errors import BundleError
from dspark.runtime.scheduling.options import SpeculationPlan

__all__ = ["find_costs"]


def find_costs(
    plan: SpeculationPlan | None,
    bundle: Bundle,
    provider: Provider | Selection,
    threads: int | None,
    requests: int,
    graphs: Callable[[], Mapping[str, Session]],
    notify: Callable[[str], None],
) -> CostTable | None:
    """The table that was measured for this bundle on this device, or else one that is measured now and kept.

    Args:
        plan: How to speculate; None is returned for one whose scheduler does not ask what steps cost.
        bundle: The bundle.
        provider: What runs its graphs.
        threads: Host threads.
        requests: Requests that run at once at most.
        graphs: Gives its graphs, if they are needed.
        notify: Told why it takes longer, and why a table could not be used or kept.
    """
    if plan is None or not plan.needs_costs:
        return None
    key = cost_key(bundle, provider, threads)
    try:
        table = read_costs(bundle, key)
    except BundleError as error:
        notify(f"{error}; measuring anew")
        table = None
    if table is not None and table.max_requests >= requests:
        return table
    if table is not None:
        notify(
            f"{cost_file(bundle, key)}: was measured with {table.max_requests} requests at most; there can be "
            f"{requests}; measuring briefly for now (dspark-run profile --max-requests {requests} does for good)"
        )
    else:
        notify(f"Measuring briefly what steps cost on this device: {cost_file(bundle, key)}")
    measured = measure(bundle, graphs(), brief_grid(requests, plan.draft_length)).table(key, brief=True)
    if table is None or table.brief:
        try:
            write_costs(bundle, measured)
        except OSError as error:
            notify(f"The measurement cannot be kept: {error}")
    return measured
