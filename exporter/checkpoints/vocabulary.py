"""Reduced draft vocabularies: which target id each draft id stands for."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dspark.exporter.checkpoints.description import Target
from dspark.exporter.checkpoints.tensors import FileTensor
from dspark.exporter.errors import CheckpointError

__all__ = ["VOCABULARY_TABLES", "borrowed_tensors", "read_draft_vocabulary"]

VOCABULARY_TABLES = ("d2t", "t2d")


def read_draft_vocabulary(
    tensors: Mapping[str, FileTensor], draft_size: int | None, target: Target, where: str
) -> NDArray[np.int64] | None:
    """Reads the tables ``d2t`` and ``t2d``.

    ``d2t`` holds offsets: draft id i stands for target id ``i + d2t[i]``. ``t2d`` marks the target ids that have a
    draft id.

    Args:
        tensors: The drafter's; the tables are the only ones that are read.
        draft_size: ``draft_vocab_size``, if the configuration has it.
        target: What the drafter drafts for.
        where: The checkpoint, for messages.

    Returns:
        Target ids int64 ``[V']``, increasing; None if the draft vocabulary is the target's.

    Raises:
        CheckpointError: If a reduced vocabulary has no ``d2t`` or an unfilled one, or the tables contradict each other,
            the configuration or the target.
    """
    target_size = target.vocabulary_size
    size = draft_size or (tensors["d2t"].shape[0] if "d2t" in tensors else target_size)
    if not 0 < size <= target_size:
        raise CheckpointError(f"{where}: draft_vocab_size = {size}, but the target's vocabulary size is {target_size}.")
    if "d2t" not in tensors:
        if size < target_size:
            raise CheckpointError(
                f"{where}: d2t is missing; the {size} ids of draft_vocab_size must map to the target's {target_size}."
            )
        return None
    ids = _target_ids(_whole_numbers(tensors["d2t"], "d2t", size, where), target_size, where)
    if "t2d" in tensors:
        marked = np.flatnonzero(_whole_numbers(tensors["t2d"], "t2d", target_size, where))
        if not np.array_equal(marked, ids):
            raise CheckpointError(f"{where}: the {len(marked)} target ids of t2d are not the {size} ids of d2t.")
    return ids if size < target_size else None


def borrowed_tensors(draft_vocabulary: NDArray[np.int64] | None) -> tuple[str, ...]:
    """The tensors that a drafter may leave to its target: a reduced vocabulary needs an LM head of its own."""
    return ("embed_tokens.weight", "lm_head.weight") if draft_vocabulary is None else ("embed_tokens.weight",)


def _target_ids(offsets: NDArray[np.int64], target_size: int, where: str) -> NDArray[np.int64]:
    if len(offsets) < target_size and not offsets.any():
        raise CheckpointError(f"{where}: d2t is all zero, so it was never filled; the offsets of draft ids are needed.")
    ids: NDArray[np.int64] = np.arange(len(offsets)) + offsets
    outside = np.flatnonzero((ids < 0) | (ids >= target_size))
    if len(outside):
        draft = int(outside[0])
        raise CheckpointError(
            f"{where}: d2t maps draft id {draft} to {ids[draft]}, out of range of the target's {target_size} ids."
        )
    falling = np.flatnonzero(np.diff(ids) <= 0)
    if len(falling):
        draft = int(falling[0])
        raise CheckpointError(
            f"{where}: d2t maps draft ids {draft} and {draft + 1} to {ids[draft]} and {ids[draft + 1]}; target ids "
            "must be increasing."
        )
    return ids


def _whole_numbers(tensor: FileTensor, name: str, size: int, where: str) -> NDArray[np.int64]:
    if tensor.shape != (size,):
        raise CheckpointError(f"{where}: {name} has the shape {list(tensor.shape)}; [{size}] is needed.")
    values = tensor.native_rows(0, size)
    if values.dtype.kind not in "iub":
        raise CheckpointError(f"{where}: {name} is {values.dtype}; whole numbers are needed.")
    return values.astype(np.int64)
