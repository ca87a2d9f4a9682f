"""Reduced draft vocabularies: the drafter scores only the tokens that it is likely to draft.

Output stays the target's: a draft distribution without a token just never proposes it
(Leviathan et al., arXiv:2211.17192).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark.exporter.checkpoints.description import Drafter, DrafterKind, Target
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.errors import ExportError

__all__ = ["cut_vocabulary", "frequent_tokens", "limit_choices"]

CUT = ("lm_head.weight", "markov_head.markov_w2.weight")
"""Tensors with one row per draft id."""
WINDOW = 4096
"""Rows of the source that are read at once."""


def frequent_tokens(count: int, target: Target, file: Path | None) -> NDArray[np.int64]:
    """The tokens that a draft vocabulary keeps.

    Args:
        count: How many.
        target: Its stop tokens are always among them.
        file: Token ids to count: an ``.npz`` file with ``ids`` and, where only responses count, ``response_mask``, as
            ``samples/drafter/generate_data.py`` writes it. Tokens that it lacks, or all without a file, are taken in
            the order of their ids, which is the order of frequency in a BPE tokenizer's training text.

    Returns:
        Ids int64 ``[count]``, increasing.

    Raises:
        ExportError: There cannot be so many, or the file cannot be read.
    """
    size = target.vocabulary_size
    if not len(target.stop_token_ids) < count <= size:
        raise ExportError(f"a draft vocabulary has from {len(target.stop_token_ids) + 1} to {size} tokens, not {count}")
    counts = np.zeros(size, np.int64) if file is None else _counts(file, size)
    counts[list(target.stop_token_ids)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-counts, kind="stable")[:count])


def cut_vocabulary(drafter: Drafter, target: Target, tokens: NDArray[np.int64]) -> Drafter:
    """A drafter that drafts only some tokens.

    Args:
        drafter: The drafter.
        target: Lends its LM head where the drafter has none.
        tokens: Target ids, increasing.

    Raises:
        ExportError: The drafter has a reduced vocabulary already.
    """
    if drafter.draft_vocabulary is not None:
        raise ExportError(
            f"{drafter.name}: already drafts from {drafter.vocabulary_size} tokens only; leave out --draft-vocabulary"
        )
    tensors = {**drafter.tensors}
    tensors.setdefault("lm_head.weight", target.tables["lm_head.weight"])
    cut = {name: _SelectedRows(tensors[name], tokens) for name in CUT if name in tensors}
    return replace(drafter, vocabulary_size=len(tokens), draft_vocabulary=tokens, tensors=tensors | cut)


def limit_choices(drafter: Drafter | None, top_k: int) -> Drafter:
    """A drafter whose head chooses from the likeliest tokens of each slot only.

    Args:
        drafter: The drafter.
        top_k: How many.

    Raises:
        ExportError: There is no drafter that proposes blocks, or it has not so many tokens.
    """
    if drafter is None or drafter.kind is DrafterKind.EAGLE3:
        raise ExportError("--draft-top-k needs a DSpark or DFlash drafter; others have no head that it would spare")
    if not 1 <= top_k <= drafter.vocabulary_size:
        raise ExportError(f"--draft-top-k is {top_k}; {drafter.name} drafts from 1 to {drafter.vocabulary_size} tokens")
    return replace(drafter, top_k=top_k)


class _SelectedRows(LazyTensor):
    """Some rows of a tensor, increasing."""

    def __init__(self, source: LazyTensor, rows: NDArray[np.int64]) -> None:
        self.name = source.name
        self.shape = (len(rows), *source.shape[1:])
        self._source = source
        self._rows = rows

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Reads the source window by window, and only windows with a wanted row."""
        wanted = self._rows[start:stop]
        parts = []
        while len(wanted):
            first = int(wanted[0])
            inside = wanted[: np.searchsorted(wanted, first + WINDOW)]
            parts.append(self._source.rows(first, int(inside[-1]) + 1)[inside - first])
            wanted = wanted[len(inside) :]
        return np.concatenate(parts)


def _counts(file: Path, size: int) -> NDArray[np.int64]:
    """How often each token occurs."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            ids = arrays["ids"]
            mask = arrays["response_mask"] != 0 if "response_mask" in arrays.files else np.ones(ids.shape, bool)
            ids = ids[mask]
    except (OSError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise ExportError(f"{file}: no .npz file with the array ids (and response_mask): {error}") from error
    if ids.dtype.kind not in "iu" or (len(ids) and not 0 <= ids.min() <= ids.max() < size):
        raise ExportError(f"{file}: ids must be whole numbers from 0 to {size - 1}, the target's vocabulary")
    return np.bincount(ids.astype(np.int64), minlength=size)
