"""Conversations to train on: token ids and where the target speaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["Conversations", "sample_anchors"]


@dataclass(frozen=True)
class Conversations:
    """Rows filled up to one width, as ``generate_data.py`` writes them.

    Attributes:
        ids: int64 ``[n, L]`` token ids.
        responses: bool ``[n, L]``, where the token is the target's.
        lengths: int64 ``[n]``, tokens up to the last one of a response; the rest is not used.
    """

    ids: Tensor
    responses: Tensor
    lengths: Tensor

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Conversations":
        """Reads files; conversations without an anchor are left out.

        Raises:
            ValueError: A file lacks an array, or its arrays do not fit together.
        """
        ids, masks = [], []
        for path in paths:
            with np.load(path, allow_pickle=False) as file:
                missing = {"ids", "response_mask"} - set(file.files)
                if missing:
                    raise ValueError(f"{path} has no array {sorted(missing)[0]}; generate_data.py writes such files")
                ids.append(file["ids"].astype(np.int64))
                masks.append(file["response_mask"] != 0)
            if ids[-1].ndim != 2 or ids[-1].shape != masks[-1].shape:
                raise ValueError(f"{path}: ids {ids[-1].shape} and response_mask {masks[-1].shape} must be alike")
        width = max(part.shape[1] for part in ids)
        all_ids, responses = (
            torch.from_numpy(np.concatenate([np.pad(part, [(0, 0), (0, width - part.shape[1])]) for part in parts]))
            for parts in (ids, masks)
        )
        lengths = width - responses.flip(1).int().argmax(dim=1)
        return cls(all_ids, responses, lengths).take(_anchors(responses).any(dim=1))

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int] | slice | Tensor) -> "Conversations":
        """Some of the rows."""
        return Conversations(self.ids[rows], self.responses[rows], self.lengths[rows])

    @property
    def response_tokens(self) -> int:
        """Tokens of the target's."""
        return int(self.responses.sum())

    def token_counts(self, vocabulary_size: int) -> Tensor:
        """How often each token occurs in responses, int64 ``[V]``."""
        return torch.bincount(self.ids[self.responses], minlength=vocabulary_size)


def sample_anchors(responses: Tensor, count: int, block_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws anchors: positions inside responses whose next token is of the response, too.

    A row with fewer of them repeats its own; a row without any has no valid slot, and does not count in the loss.

    Args:
        responses: bool ``[B, L]``.
        count: Anchors a row, A.
        block_size: Draft tokens an anchor, γ.
        generator: Draws.

    Returns:
        Positions int64 ``[B, A]`` in order, from 1; bool ``[B, A, γ]``, whether the token a slot predicts is of the
        response like all before it.
    """
    possible = _anchors(responses)
    keys = torch.rand(responses.shape, generator=generator).masked_fill(~possible, -1)
    shuffled = keys.argsort(dim=1, descending=True)  # the possible ones first
    pick = torch.arange(count) % possible.sum(dim=1, keepdim=True).clamp(min=1)
    anchors = shuffled.gather(1, pick).clamp(min=1).sort(dim=1).values
    positions = anchors[..., None] + torch.arange(1, block_size + 1)
    inside = positions < responses.shape[1]
    spoken = responses.gather(1, positions.clamp(max=responses.shape[1] - 1).flatten(1)).view(positions.shape)
    valid = (inside & spoken).cumprod(dim=-1).bool() & possible.gather(1, anchors)[..., None]
    return anchors, valid


def _anchors(responses: Tensor) -> Tensor:
    """Which positions can be anchors, bool ``[B, L]``: the first cannot, as nothing comes before it."""
    possible = torch.zeros_like(responses)
    possible[:, 1:-1] = responses[:, 1:-1] & responses[:, 2:]
    return possible
