"""Puts evaluations of several drafters side by side, as Markdown: ``dspark-run evaluate --report`` wrote them."""

from pathlib import Path
from typing import Annotated

import typer

from dspark.runtime.evaluation.evaluator import Evaluation


def main(reports: Annotated[list[Path], typer.Argument(help="Folders that evaluate --report wrote.")]) -> None:
    """Prints a table of acceptance lengths by dataset, and one of conditional acceptance by position."""
    found = {path.name: Evaluation.model_validate_json((path / "evaluation.json").read_bytes()) for path in reports}
    datasets = list(dict.fromkeys(name for evaluation in found.values() for name in evaluation.datasets))
    print("| acceptance length |", " | ".join([*datasets, "mean"]), "|")
    print("|---|" + "---|" * (len(datasets) + 1))
    for name, evaluation in found.items():
        lengths = [evaluation.datasets[dataset].figures.acceptance.length for dataset in datasets]
        lengths.append(evaluation.macro_average.acceptance.length)
        print(f"| {name} |", " | ".join("–" if length is None else f"{length:.2f}" for length in lengths), "|")
    longest = max(evaluation.drafter.draft_length for evaluation in found.values())
    print("\n| conditional acceptance |", " | ".join(str(position) for position in range(1, longest + 1)), "|")
    print("|---|" + "---|" * longest)
    for name, evaluation in found.items():
        rates = evaluation.pooled.figures.acceptance.conditional
        rates = [*rates, *[None] * (longest - len(rates))]
        print(f"| {name} |", " | ".join("–" if rate is None else f"{rate:.2f}" for rate in rates), "|")


if __name__ == "__main__":
    typer.run(main)
