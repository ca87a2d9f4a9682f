"""``dspark-run inspect``: what a bundle holds, or where its graphs' nodes run."""

import json
from typing import Annotated

import typer
from rich.console import Console

from dspark.runtime.commands.checks import refuse_given
from dspark.runtime.commands.options import DEVICE, BundleArgument, Json, Providers, Threads
from dspark.runtime.commands.terminal import messages

__all__ = ["inspect"]


def inspect(
    bundle: BundleArgument,
    show_nodes: Annotated[
        bool,
        typer.Option(
            "--placement", help="Show instead which node of each graph would run where.", rich_help_panel=DEVICE
        ),
    ] = False,
    provider: Providers = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Shows what a bundle holds and what it was compiled for, or where its graphs' nodes run."""
    from dspark.runtime.bundle.bundle import Bundle
    from dspark.runtime.bundle.calibration import read_calibration
    from dspark.runtime.commands.display import show_bundle, show_engines, show_placement
    from dspark.runtime.commands.provider_report import engine_rows, placement
    from dspark.runtime.loading.host import HostOptions

    if not show_nodes:
        refuse_given({"--provider": provider, "--threads": threads}, "needs --placement")
    opened = Bundle.open(bundle, check_hashes=False)
    if show_nodes:
        with messages.status("Placing"):
            nodes = placement(opened, HostOptions.parse(provider, threads=threads))
        if as_json:
            print(json.dumps({graph: [vars(node) for node in placed] for graph, placed in nodes.items()}, indent=2))
        else:
            show_placement(nodes, Console())
    elif as_json:
        print(json.dumps({**opened.manifest.model_dump(mode="json"), "engines": engine_rows(opened)}, indent=2))
    else:
        show_bundle(opened.manifest, read_calibration(opened), Console())
        show_engines(engine_rows(opened), Console())
