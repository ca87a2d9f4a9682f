"""Figures of a race, as a table and for JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from protocol import Answer
from race import Result
from rich.console import Console
from rich.table import Table

__all__ = ["Figures", "Standing", "as_dict", "show", "standings"]


@dataclass(frozen=True)
class Figures:
    """Speeds in tokens a second, medians over prompts.

    Attributes:
        decoding: After the prompt's computation; None when no output has more than its first tokens.
        whole: Prompt included.
        tokens: All tokens produced.
    """

    decoding: float | None
    whole: float
    tokens: int


@dataclass(frozen=True)
class Standing:
    """How one contestant compares.

    Attributes:
        result: How it did.
        figures: Over all prompts; None if it is out of the race.
        datasets: The same by prompt file.
        over_reference: Decoding speed over the reference's.
        over_best_peer: Decoding speed over that of the fastest peer.
        identical: Prompts whose output is the reference's.
    """

    result: Result
    figures: Figures | None
    datasets: Mapping[str, Figures]
    over_reference: float | None
    over_best_peer: float | None
    identical: int | None


def figures(answers: Sequence[Answer]) -> Figures:
    """The figures of some answers, at least one."""
    later = [(len(answer.token_ids) - answer.first_tokens, answer.decode_seconds) for answer in answers]
    decoding = [tokens / seconds for tokens, seconds in later if tokens]
    whole = [len(answer.token_ids) / (answer.prefill_seconds + answer.decode_seconds) for answer in answers]
    return Figures(
        decoding=median(decoding) if decoding else None,
        whole=median(whole),
        tokens=sum(len(answer.token_ids) for answer in answers),
    )


def standings(results: Sequence[Result], datasets: Sequence[str]) -> list[Standing]:
    """Compares results, of which the first is the reference.

    Args:
        results: What the race gave.
        datasets: Each prompt's file.

    Returns:
        The standings, in the order of the results.
    """
    overall = [None if result.error is not None else figures(result.answers) for result in results]
    speeds = [None if found is None else found.decoding for found in overall]
    peers = [speed for result, speed in zip(results, speeds, strict=True) if result.contestant.peer and speed]
    best_peer = max(peers, default=None)
    reference = None if overall[0] is None else results[0].answers
    return [
        Standing(
            result=result,
            figures=found,
            datasets={} if found is None else _by_dataset(result.answers, datasets),
            over_reference=_ratio(speed, speeds[0]),
            over_best_peer=_ratio(speed, best_peer),
            identical=None if found is None or reference is None else _identical(result.answers, reference),
        )
        for result, found, speed in zip(results, overall, speeds, strict=True)
    ]


def show(console: Console, standings: Sequence[Standing], absent: Sequence[str]) -> None:
    """Prints the race, fastest first; then the versions, and who was not there."""
    table = Table("contestant", title="Tokens a second, medians over prompts", title_justify="left")
    table.columns[0].no_wrap = True
    for heading in ("decode", "total", "× ref.", "× peer", "same", "tokens"):
        table.add_column(heading, justify="right")
    racing = [standing for standing in standings if standing.figures is not None]
    failed = [standing.result for standing in standings if standing.figures is None]
    for standing in sorted(racing, key=_speed, reverse=True):
        table.add_row(standing.result.contestant.name, *_cells(standing))
    for result in failed:
        table.add_row(result.contestant.name, "failed")
    console.print(table)
    versions = {name: version for standing in racing for name, version in standing.result.versions.items()}
    notes = [f"{result.contestant.name} failed: {result.error}" for result in failed]
    notes.append(
        f"decode: after the prompt; total: with it; × ref.: decoding over {standings[0].result.contestant.name}; "
        "× peer: over the fastest peer; same: prompts whose output is the reference's; tokens: produced by all prompts."
    )
    if absent:
        notes.append(f"Not installed: {'; '.join(absent)}.")
    notes.append(f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.")
    for note in notes:
        console.print(note, markup=False, highlight=False)


def as_dict(standings: Sequence[Standing], absent: Sequence[str]) -> dict[str, Any]:
    """The race for JSON; what was measured of every prompt included, its tokens excepted."""
    return {"contestants": [_row(standing) for standing in standings], "not_installed": list(absent)}


def _row(standing: Standing) -> dict[str, Any]:
    result = standing.result
    return {
        "name": result.contestant.name,
        "peer": result.contestant.peer,
        "versions": result.versions,
        "error": result.error,
        "tokens_per_second": None if standing.figures is None else asdict(standing.figures),
        "datasets": {name: asdict(found) for name, found in standing.datasets.items()},
        "over_reference": standing.over_reference,
        "over_best_peer": standing.over_best_peer,
        "identical_outputs": standing.identical,
        "prompts": [
            {
                "tokens": len(answer.token_ids),
                "first_tokens": answer.first_tokens,
                "prefill_seconds": answer.prefill_seconds,
                "decode_seconds": answer.decode_seconds,
            }
            for answer in result.answers
        ],
    }


def _cells(standing: Standing) -> list[str]:
    assert standing.figures is not None  # only those in the race have cells
    identical = "–" if standing.identical is None else f"{standing.identical / len(standing.result.answers):.0%}"
    ratios = [_number(ratio, 2) for ratio in (standing.over_reference, standing.over_best_peer)]
    speeds = [_number(standing.figures.decoding, 1), _number(standing.figures.whole, 1)]
    return [*speeds, *ratios, identical, str(standing.figures.tokens)]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _speed(standing: Standing) -> float:
    return (standing.figures.decoding if standing.figures else None) or 0.0


def _by_dataset(answers: Sequence[Answer], datasets: Sequence[str]) -> dict[str, Figures]:
    pairs = list(zip(answers, datasets, strict=True))
    return {name: figures([answer for answer, of in pairs if of == name]) for name in dict.fromkeys(datasets)}


def _identical(answers: Sequence[Answer], reference: Sequence[Answer]) -> int:
    return sum(ours.token_ids == theirs.token_ids for ours, theirs in zip(answers, reference, strict=True))


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base
