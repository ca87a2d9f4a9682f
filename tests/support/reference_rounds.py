"""The reference's rounds of the golden prompts, and their figures recounted."""

import json
from pathlib import Path
from typing import Any

from tests.support.golden_models import GOLDEN, PROMPTS

__all__ = ["DATASETS", "Pairs", "dataset_files", "ending_with", "recounted", "reference_rounds"]

Pairs = list[tuple[int, int]]
"""Verified and accepted draft tokens, per round."""

DATASETS = {"first": [0, 1, 2], "last": [3, 4]}


def reference_rounds(name: str, case: str, prompt: int) -> Pairs:
    """The reference's rounds up to one whose draft was not rejected at once."""
    golden = json.loads((GOLDEN / name / "golden.json").read_text())[case][prompt]
    pairs = list(zip(golden["proposal_lengths"], golden["accepted_draft_lengths"], strict=True))[:-3]
    while pairs[-1][1] == 0:
        pairs.pop()
    return pairs


def ending_with(pairs: Pairs) -> int:
    """The ``max_new_tokens`` at which generation ends with these rounds."""
    return 1 + sum(accepted + 1 for _, accepted in pairs)


def dataset_files(folder: Path, name: str, case: str = "greedy") -> list[Path]:
    files = []
    for dataset, indices in DATASETS.items():
        rows = [
            {"prompt_ids": PROMPTS[index], "max_new_tokens": ending_with(reference_rounds(name, case, index))}
            for index in indices
        ]
        files.append(folder / f"{dataset}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def recounted(pairs: Pairs) -> dict[str, Any]:
    """Counts and acceptance figures from their definitions."""
    verified, accepted = (sum(column) for column in zip(*pairs, strict=True))
    reached = [sum(v > k and a >= k for v, a in pairs) for k in range(5)]
    stood = [sum(v > k and a > k for v, a in pairs) for k in range(5)]
    return {
        "rounds": len(pairs),
        "verified": verified,
        "accepted": accepted,
        "reached": reached,
        "reached_and_accepted": stood,
        "observed": [sum(v > k for v, _ in pairs) for k in range(5)],
        "length": 1 + accepted / len(pairs),
        "rate": accepted / verified,
        "conditional": [part / whole if whole else None for part, whole in zip(stood, reached, strict=True)],
    }
