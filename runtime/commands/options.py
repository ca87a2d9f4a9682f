"""Options that several commands share, and the panels that help shows options in."""

from pathlib import Path
from typing import Annotated

import typer

from dspark.runtime.commands.completion import complete_profile, complete_provider
from dspark.runtime.scheduling.names import SchedulerName

__all__ = [
    "DEVICE",
    "MEASUREMENT",
    "OUTPUT",
    "PROMPTS",
    "SAMPLING",
    "SERVING",
    "SPECULATION",
    "AllowFallback",
    "BatchSize",
    "BundleArgument",
    "ConfidenceThreshold",
    "FirstSeed",
    "FrequencyPenalty",
    "Inputs",
    "Json",
    "MaxDraftTokens",
    "MaxNewTokens",
    "MinP",
    "MoreInputs",
    "PresencePenalty",
    "Profile",
    "Providers",
    "RepetitionPenalty",
    "Samples",
    "Scheduler",
    "Seed",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
]

PROMPTS = "Prompts"
SAMPLING = "Sampling"
SPECULATION = "Speculation"
SERVING = "Serving"
MEASUREMENT = "Measurement"
DEVICE = "Device"
OUTPUT = "Output"

BundleArgument = Annotated[Path, typer.Argument(help="The bundle's folder.", show_default=False)]

Inputs = Annotated[
    list[Path],
    typer.Option("--input", help="A JSONL file of prompts; may be given several times.", rich_help_panel=PROMPTS),
]
MoreInputs = Annotated[
    list[Path] | None, typer.Argument(metavar="[FILE]...", help="More files: --input may be followed by several.")
]
Samples = Annotated[
    int | None,
    typer.Option(help="Rows taken of each file, the first ones.", show_default="all", rich_help_panel=PROMPTS),
]

MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate at most.", rich_help_panel=SAMPLING)]
Temperature = Annotated[float, typer.Option(help="Below 1e-5 the likeliest token is taken.", rich_help_panel=SAMPLING)]
TopK = Annotated[int, typer.Option(help="Sample from the K likeliest tokens; 0: from all.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens of this mass.", rich_help_panel=SAMPLING)]
MinP = Annotated[
    float,
    typer.Option(help="Drop tokens less likely than this times the likeliest.", rich_help_panel=SAMPLING),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Divides logits of tokens seen before.", rich_help_panel=SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtracted from logits of generated tokens.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, once per occurrence.", rich_help_panel=SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=SAMPLING)]
FirstSeed = Annotated[
    int,
    typer.Option("--seed", help="Seed of the first prompt; each further one has the next.", rich_help_panel=SAMPLING),
]

Scheduler = Annotated[
    SchedulerName | None,
    typer.Option(
        help="Decides how many draft tokens are verified: hardware, hardware-async, threshold, fixed or off.",
        metavar="NAME",
        show_default="threshold if one is given, else hardware, or fixed for fixed shapes",
        rich_help_panel=SPECULATION,
    ),
]
MaxDraftTokens = Annotated[
    int | None,
    typer.Option(help="The most draft tokens verified per round.", show_default="all", rich_help_panel=SPECULATION),
]
ConfidenceThreshold = Annotated[
    float | None,
    typer.Option(
        help="Verify draft tokens up to the first less sure than this.",
        show_default="0.6",
        rich_help_panel=SPECULATION,
    ),
]

Profile = Annotated[
    str | None,
    typer.Option(
        help="Serving profile: flash (lowest latency), pro (highest throughput), or a YAML file.",
        autocompletion=complete_profile,
        rich_help_panel=SERVING,
    ),
]
BatchSize = Annotated[int | None, typer.Option(help="Requests that run at once.", rich_help_panel=SERVING)]

Threads = Annotated[int | None, typer.Option(help="Host threads.", show_default="one per core", rich_help_panel=DEVICE)]
Providers = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        metavar="[GRAPH=]NAME[:KEY=VALUE,...]",
        help="What runs the graphs, or one of them; of several the first that can (see dspark-run providers).",
        show_default="cpu",
        autocompletion=complete_provider,
        rich_help_panel=DEVICE,
    ),
]
AllowFallback = Annotated[
    bool,
    typer.Option(
        "--allow-fallback", help="Let nodes that a device cannot run run on the host's CPU.", rich_help_panel=DEVICE
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)]
