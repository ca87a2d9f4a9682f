"""Puts evaluations of several drafters side by side, as Markdown: ``dspark-run evaluate --report`` wrote them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from dspark.runtime.evaluation.evaluator import Evaluation


def main(reports: Annotated[list[Path], typer.Argument(help="Folders that evaluate --report wrote.")]) -> None:
    """Prints a table of acceptance lengths by dataset, and one of conditional acceptance by position."""
    found = {path.name: Evaluation.model_validate_json((path / "evaluation.json").read_bytes()) for path in reports}
    datasets = list(dict.fromkeys(name for evaluation in found.values() for name in evaluation.datasets))
    lengths = {
        name: [
            *(evaluation.datasets[dataset].figures.acceptance.length for dataset in datasets),
            evaluation.macro_average.acceptance.length,
        ]
        for name, evaluation in found.items()
    }
    show("acceptance length", [*datasets, "mean"], lengths)
    rates = {name: evaluation.pooled.figures.acceptance.conditional for name, evaluation in found.items()}
    longest = max(map(len, rates.values()))
    print()
    show("conditional acceptance", [str(position) for position in range(1, longest + 1)], rates)


def show(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | None]]) -> None:
    """Prints a Markdown table; what a row lacks is a dash."""
    print(f"| {title} |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for name, values in rows.items():
        cells = ["–" if value is None else f"{value:.2f}" for value in values]
        print(f"| {name} |", " | ".join([*cells, *["–"] * (len(columns) - len(cells))]), "|")


if __name__ == "__main__":
    typer.run(main)
