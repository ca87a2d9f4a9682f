"""Draws what training logged: the held-out acceptance length against the time of training."""

import json
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure


def main(
    runs: Annotated[list[Path], typer.Argument(help="Folders that train.py wrote.")],
    output: Annotated[Path, typer.Option(help="The picture, PNG or SVG.")] = Path("training.png"),
) -> None:
    """Draws the progress of one or more runs."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        minutes = [entry["minutes"] for entry in log]
        (line,) = axes.plot(minutes, [entry["acceptance_length"] for entry in log], marker="o", ms=3, label=run.name)
        greedy = [entry["greedy_acceptance_length"] for entry in log]
        axes.plot(minutes, greedy, linestyle="--", color=line.get_color(), label=f"{run.name}, likeliest tokens")
    axes.set(xlabel="minutes of training", ylabel="held-out acceptance length")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    typer.run(main)
