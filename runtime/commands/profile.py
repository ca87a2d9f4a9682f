"""``dspark-run profile``: measures what steps and drafts cost."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from dspark.runtime.commands.options import (
    MEASUREMENT,
    AllowFallback,
    BundleArgument,
    Json,
    Providers,
    Threads,
)
from dspark.runtime.commands.terminal import messages, progress
from dspark.runtime.errors import RequestError
from dspark.runtime.reports.lines import notices
from dspark.runtime.reports.pictures import can_draw
from dspark.runtime.reports.tables import show_tables

__all__ = ["profile"]


def profile(
    bundle: BundleArgument,
    max_requests: Annotated[int, typer.Option(help="The most requests of a step.", rich_help_panel=MEASUREMENT)] = 8,
    repeats: Annotated[
        int, typer.Option(help="Times that every kind of step is measured.", rich_help_panel=MEASUREMENT)
    ] = 11,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """Measures what steps and drafts cost on this device, for the hardware schedulers.

    Writes a table, and with matplotlib a picture of it, into the bundle's folder "cost".
    """
    from dspark.runtime.bundle.bundle import Bundle
    from dspark.runtime.commands.cost_report import draw_profile, profile_tables
    from dspark.runtime.costs.measure import full_grid, measure
    from dspark.runtime.costs.store import check_cost_folder, cost_key, write_costs
    from dspark.runtime.loading.host import HostOptions
    from dspark.runtime.loading.serving import check_batch_size
    from dspark.runtime.loading.sessions import open_sessions
    from dspark.runtime.model.limits import ModelLimits

    check_batch_size(max_requests, "max_requests")
    if repeats < 1:
        raise RequestError(f"repeats is {repeats}; it must be at least 1")
    host = HostOptions.parse(provider, allow_fallback=allow_fallback, threads=threads)
    opened = Bundle.open(bundle, check_hashes=False)
    manifest = opened.manifest
    if manifest.drafter is None:
        raise RequestError(f"{bundle}: has no drafter, so there is nothing to schedule")
    if manifest.shapes is not None:
        raise RequestError(f"{bundle}: has fixed shapes, so what a step costs does not depend on its tokens")
    check_cost_folder(opened)
    with messages.status(Text(f"Loading {bundle}")):
        sessions = open_sessions(opened, host, list(manifest.precision))
        check_batch_size(max_requests, "max_requests", ModelLimits.of(manifest, sessions))
    grid = full_grid(max_requests, manifest.drafter.draft_length, repeats)
    with progress(repeats + 1, "Measuring") as advance:
        measured = measure(opened, sessions, grid, advance)
    table = measured.table(cost_key(opened, host.selection, host.threads))
    if as_json:
        print(table.model_dump_json(indent=2))
    else:
        show_tables(profile_tables(measured), Console())
    file = write_costs(opened, table, draw_profile(measured) if can_draw() else None)
    if not as_json:
        picture = "and a picture beside it" if can_draw() else "no picture: pip install 'dspark-onnx[report]'"
        notices(Console())(f"Written: {file}, {picture}")
