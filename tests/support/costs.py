"""Cost tables that were not measured."""

import shutil
from collections.abc import Callable
from pathlib import Path

from dspark.providers import find_provider
from dspark.runtime import Bundle
from dspark.runtime.costs.store import COST_FOLDER, cost_key, write_costs
from dspark.runtime.costs.table import CostKey, CostTable, DraftCurve, StepCurve

__all__ = ["KEY", "copy_without_costs", "cost_table", "key_of", "write_flat_costs"]

KEY = CostKey(
    device="Abacus, 1 cores",
    provider="cpu",
    threads=1,
    precision={"target": "fp32"},
    files={"target.onnx": "0"},
    versions={"onnxruntime": "1"},
)


def linear(requests: int, tokens: int, context: int) -> float:
    """Milliseconds of a step."""
    return 5 + 0.5 * tokens + requests * context / 512


def cost_table(
    step: Callable[[int, int, int], float] = linear,
    draft: Callable[[int, int], float] = lambda requests, context: 0.5 + 0.1 * requests + requests * context / 4096,
    *,
    max_requests: int = 8,
    draft_length: int = 5,
    key: CostKey = KEY,
) -> CostTable:
    """A table of made-up costs in milliseconds: ``step`` of requests, all tokens and context, ``draft`` of requests
    and context."""
    counts = sorted({1, 2, max_requests // 2, max_requests} - {0})
    tokens = range(1, draft_length + 2)
    return CostTable(
        key=key,
        max_batch_tokens=max_requests * (draft_length + 1),
        curves=tuple(
            StepCurve(
                requests=requests,
                context_length=context,
                sample_batch_tokens=tuple(requests * each for each in tokens),
                sample_steps_per_sec=tuple(1e3 / step(requests, requests * each, context) for each in tokens),
            )
            for requests, context in [(1, 1024), *[(count, 128) for count in counts]]
        ),
        draft_curves=tuple(
            DraftCurve(
                context_length=context,
                sample_requests=tuple(requests),
                sample_drafts_per_sec=tuple(1e3 / draft(count, context) for count in requests),
            )
            for context, requests in ((128, counts), (1024, [1]))
        ),
    )


def write_flat_costs(path: Path) -> None:
    """Gives a bundle with a drafter a table for this device and one thread, by which verifying costs nothing."""
    bundle = Bundle.open(path)
    if bundle.manifest.drafter is None:
        return
    length = bundle.manifest.drafter.draft_length
    flat = cost_table(lambda *_: 1.0, lambda *_: 1e-6, max_requests=64, draft_length=length, key=key_of(path))
    write_costs(bundle, flat)


def key_of(path: Path) -> CostKey:
    """The key of costs on this device with one thread."""
    return cost_key(Bundle.open(path), find_provider("cpu"), 1)


def copy_without_costs(bundle: Path, copy: Path) -> Path:
    """A copy of a bundle without its tables."""
    return shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns(COST_FOLDER))
