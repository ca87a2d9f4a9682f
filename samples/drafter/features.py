"""What the target makes of the conversations, computed once and kept: training reads it many times.

A drafter sees its target only through the taps and the final hidden state. In bfloat16 they take 7 kB a token for
SmolLM2; the target itself need not run again, for any number of epochs and drafters.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from conversations import Conversations
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FeatureStore", "Rows"]

SHARD = 128
"""Conversations a file."""
PASS = 8
"""Conversations a forward pass."""


@dataclass(frozen=True)
class Rows:
    """Conversations with their features, filled up to one length.

    Attributes:
        ids: int64 ``[B, L]``.
        responses: bool ``[B, L]``.
        taps: bfloat16 ``[B, L, T·H]``, the layer outputs side by side.
        final: bfloat16 ``[B, L, H]``, the normed state that the LM head reads.
    """

    ids: Tensor
    responses: Tensor
    taps: Tensor
    final: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> "Rows":
        """The same on a device, features in the given precision."""
        taps, final = (value.to(device, dtype, non_blocking=True) for value in (self.taps, self.final))
        return Rows(self.ids.to(device), self.responses.to(device), taps, final)


class FeatureStore:
    """Features of conversations in files, computed where they are missing.

    Files are named by what they hold, so that data which grows at its end reuses what is there.

    Args:
        folder: Where the files are.
        conversations: The conversations.
        taps: Layer outputs to keep.
        model: The target; called only for what is missing.
        fingerprint: Of the target and its precision.
    """

    def __init__(
        self, folder: Path, conversations: Conversations, taps: Sequence[int], model: nn.Module, fingerprint: str
    ) -> None:
        self.conversations = conversations
        folder.mkdir(parents=True, exist_ok=True)
        shards = [conversations.take(slice(at, at + SHARD)) for at in range(0, len(conversations), SHARD)]
        paths = [folder / f"{_name(shard, taps, fingerprint)}.safetensors" for shard in shards]
        missing = [(shard, path) for shard, path in zip(shards, paths, strict=True) if not path.exists()]
        for shard, path in track(missing, description="Target's features", disable=not missing):
            partial = path.with_suffix(f".{os.getpid()}")
            try:
                save_file(_compute(model, shard, taps), partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        self._files = [safe_open(path, "pt") for path in paths]
        self._starts = [shard.lengths.cumsum(0) - shard.lengths for shard in shards]

    def rows(self, indices: Sequence[int]) -> Rows:
        """Conversations with their features."""
        chosen = self.conversations.take(indices)
        longest = _rounded(int(chosen.lengths.max()), chosen.ids.shape[1])
        features = [self._read(index) for index in indices]
        taps, final = (
            torch.stack([F.pad(row[name], (0, 0, 0, longest - len(row[name]))) for row in features])
            for name in ("taps", "final")
        )
        return Rows(chosen.ids[:, :longest], chosen.responses[:, :longest], taps, final)

    def _read(self, index: int) -> dict[str, Tensor]:
        shard, row = divmod(index, SHARD)
        start, length = int(self._starts[shard][row]), int(self.conversations.lengths[index])
        file = self._files[shard]
        return {name: file.get_slice(name)[start : start + length] for name in ("taps", "final")}


def _rounded(length: int, most: int) -> int:
    """A multiple of 64 where there is room: compiled layers are made anew for every other shape."""
    return min(most, -(-length // 64) * 64)


def _name(shard: Conversations, taps: Sequence[int], fingerprint: str) -> str:
    content = sha256(f"{fingerprint} {list(taps)} {shard.lengths.tolist()}".encode())
    for ids, length in zip(shard.ids, shard.lengths.tolist(), strict=True):
        content.update(ids[:length].numpy().tobytes())
    return content.hexdigest()[:32]


@torch.inference_mode()
def _compute(model: nn.Module, shard: Conversations, taps: Sequence[int]) -> dict[str, Tensor]:
    """Features of one file, rows joined without what fills them up."""
    device = next(model.parameters()).device
    parts: dict[str, list[Tensor]] = {"taps": [], "final": []}
    for at in range(0, len(shard), PASS):
        part = shard.take(slice(at, at + PASS))
        longest = _rounded(int(part.lengths.max()), part.ids.shape[1])
        inside = torch.arange(longest) < part.lengths[:, None]
        output = model(part.ids[:, :longest].to(device), use_cache=False, output_hidden_states=True, logits_to_keep=1)
        states = output.hidden_states
        parts["taps"].append(torch.cat([states[tap + 1].cpu()[inside] for tap in taps], dim=-1).bfloat16())
        parts["final"].append(states[-1].cpu()[inside].bfloat16())
    return {name: torch.cat(values) for name, values in parts.items()}
