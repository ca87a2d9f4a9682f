"""Options and messages that the commands share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.runtime.errors import RequestError
from dspark.runtime.scheduling.options import SchedulerName

__all__ = [
    "AllowFallback",
    "BatchSize",
    "BundleArgument",
    "ConfidenceThreshold",
    "Json",
    "MaxDraftTokens",
    "Profile",
    "Providers",
    "Scheduler",
    "Threads",
    "messages",
    "refuse_given",
]

messages = Console(stderr=True, emoji=False)

BundleArgument = Annotated[Path, typer.Argument(help="The bundle's folder.")]
Scheduler = Annotated[
    SchedulerName | None,
    typer.Option(
        help="How many draft tokens are verified.",
        show_default="threshold if one is given, else hardware, or fixed for fixed shapes",
    ),
]
MaxDraftTokens = Annotated[int | None, typer.Option(help="The most draft tokens verified a round.", show_default="all")]
ConfidenceThreshold = Annotated[
    float | None, typer.Option(help="Verify draft tokens up to the first less sure than this.", show_default="0.6")
]
Profile = Annotated[
    str | None, typer.Option(help="Serving profile: flash (lowest latency), pro (highest throughput), or a YAML file.")
]
BatchSize = Annotated[int, typer.Option(help="Requests that run at once.")]
Threads = Annotated[int | None, typer.Option(help="Host threads.", show_default="one a core")]
Providers = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        metavar="[GRAPH=]NAME[:KEY=VALUE,…]",
        help="What runs the graphs, or one of them; of several the first that can (see dspark-run providers).",
        show_default="cpu",
    ),
]
AllowFallback = Annotated[
    bool, typer.Option("--allow-fallback", help="Let nodes that a device cannot run run on the host's CPU.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def refuse_given(options: Mapping[str, object], why: str) -> None:
    """Refuses options that another makes meaningless, or that mean nothing without another.

    Args:
        options: Their values; None or False if they are not given.
        why: Ends the message, and names the other.

    Raises:
        RequestError: One is given.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise RequestError(f"{name} {why}")
