"""``cost/<device>.json``: what steps and drafts of a bundle cost on a device, as measured there.

A table holds for one device, provider, number of threads, precision, set of files and set of versions: its key. One
with another key is not used.
"""

import os
import re
import reprlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark.providers import Provider, Selection
from dspark.providers.errors import one_line
from dspark.providers.host import onnxruntime_version, processor
from dspark.runtime.bundle import Bundle
from dspark.runtime.calibration import confidence_files
from dspark.runtime.errors import BundleError, RequestError
from dspark.runtime.versioned_file import read_versioned
from dspark.runtime.whole_file import write_whole

__all__ = [
    "COST_FOLDER",
    "CostKey",
    "CostModel",
    "CostTable",
    "DraftCurve",
    "StepCurve",
    "check_cost_folder",
    "cost_file",
    "cost_key",
    "read_costs",
    "write_costs",
]

COST_FOLDER = "cost"
COST_VERSION = 2

Floats = NDArray[np.float64]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Context = Annotated[int, Field(ge=1, le=1 << 30)]
Rate = Annotated[float, Field(ge=1e-6, le=1e12)]
"""Times a second: from one in eleven days to what no clock can tell."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CostKey(_Model):
    """What a table holds for.

    Attributes:
        device: Name of what runs the target's graph, and of the host, whose part of a step counts as well.
        provider: What runs the graphs.
        threads: Host threads.
        precision: Precisions of each graph.
        files: SHA-256 of the graphs and the weights.
        versions: Of this package and of what the provider runs the graphs with.
    """

    device: str
    provider: str
    threads: Count
    precision: dict[str, str]
    files: dict[str, str]
    versions: dict[str, str]

    @property
    def file_name(self) -> str:
        """The table's file in the bundle's folder of tables."""
        name = f"{self.provider} {self.device} {self.threads} threads"
        return f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def _check_samples(name: str, samples: Sequence[int], first: int) -> None:
    """Refuses what does not rise from ``first`` on."""
    if samples[0] != first or any(later <= earlier for earlier, later in pairwise(samples)):
        raise ValueError(f"{name} is {_listed(samples)}; it must rise, from {first} on")


def _check_lengths(model: BaseModel, name: str, rates: str) -> None:
    """Refuses samples that have not a rate each."""
    samples, found = len(getattr(model, name)), len(getattr(model, rates))
    if samples != found:
        raise ValueError(f"{rates} has {found} values and {name} {samples}; they must be equally long")


def _listed(samples: Sequence[int]) -> str:
    return reprlib.repr(list(samples))


class StepCurve(_Model):
    """Steps of so many requests over a cache of so many tokens.

    Attributes:
        requests: R; all verify equally many tokens.
        context_length: Cached tokens of each request that attention reads.
        sample_batch_tokens: Verified tokens N of all requests together, anchors included, rising from R.
        sample_steps_per_sec: Steps of so many tokens a second, the median of several.
    """

    requests: Count
    context_length: Context
    sample_batch_tokens: tuple[Count, ...] = Field(min_length=1)
    sample_steps_per_sec: tuple[Rate, ...]

    @model_validator(mode="after")
    def _consistent(self) -> "StepCurve":
        _check_samples("sample_batch_tokens", self.sample_batch_tokens, self.requests)
        _check_lengths(self, "sample_batch_tokens", "sample_steps_per_sec")
        return self


class DraftCurve(_Model):
    """Drafts over a cache of so many tokens.

    Attributes:
        context_length: Cached tokens of each request that attention reads.
        sample_requests: Requests R of a draft, rising from 1.
        sample_drafts_per_sec: Drafts for so many requests a second, the median of several.
    """

    context_length: Context
    sample_requests: tuple[Count, ...] = Field(min_length=1)
    sample_drafts_per_sec: tuple[Rate, ...]

    @model_validator(mode="after")
    def _consistent(self) -> "DraftCurve":
        _check_samples("sample_requests", self.sample_requests, 1)
        _check_lengths(self, "sample_requests", "sample_drafts_per_sec")
        return self


class CostTable(_Model):
    """What was measured.

    Attributes:
        key: What it holds for.
        brief: Whether little time was spent on it; another brief measurement may then take its place.
        max_batch_tokens: The largest N of a step.
        curves: Steps, at the smallest context for 1 request and more, at longer ones for 1 request.
        draft_curves: Drafts, at the smallest context for 1 request and more, maybe at a longer one for 1 request.
    """

    schema_version: Literal[2] = 2
    key: CostKey
    brief: bool = False
    max_batch_tokens: Count
    curves: tuple[StepCurve, ...] = Field(min_length=1)
    draft_curves: tuple[DraftCurve, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> "CostTable":
        contexts = [curve.context_length for curve in self.draft_curves]
        _check_samples("context_length of draft_curves", contexts, contexts[0])
        shortest = min(curve.context_length for curve in self.curves)
        alone = {curve.context_length: curve.sample_batch_tokens for curve in self.curves if curve.requests == 1}
        if shortest not in alone:
            raise ValueError(f"curves has none of 1 request at the smallest context_length, {shortest}")
        shapes = [(curve.requests, curve.context_length) for curve in self.curves]
        for requests, context in shapes:
            where = f"curves has requests {requests} at context_length {context}"
            if shapes.count((requests, context)) > 1:
                raise ValueError(f"{where} twice; it must be there once")
            if requests > 1 and context > shortest:
                raise ValueError(f"{where}; beyond the smallest, {shortest}, there must be only 1 request")
            if requests == 1 and alone[context] != alone[shortest]:
                raise ValueError(
                    f"{where} with sample_batch_tokens {_listed(alone[context])}; "
                    f"all of 1 request must have {_listed(alone[shortest])}"
                )
        most = max(curve.sample_batch_tokens[-1] for curve in self.curves)
        if self.max_batch_tokens != most:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}; the largest of sample_batch_tokens is {most}"
            )
        return self

    @property
    def max_requests(self) -> int:
        """The most requests of a step that was measured."""
        return max(curve.requests for curve in self.curves)


class CostModel:
    """What any round costs, by interpolation in a table.

    Between numbers of requests it interpolates at equally many tokens a request. Attention's time is linear in the
    context, so that what context costs is taken from steps of one request. Attention computes each request of a step
    as if it were the longest, while those that were measured were equally long.

    Args:
        table: The measurements.
    """

    def __init__(self, table: CostTable) -> None:
        near_drafts, far_drafts = table.draft_curves[0], table.draft_curves[-1]
        self._drafts = np.array(near_drafts.sample_requests), 1 / np.array(near_drafts.sample_drafts_per_sec)
        self._draft_context = near_drafts.context_length
        slower = 1 / far_drafts.sample_drafts_per_sec[0] - 1 / near_drafts.sample_drafts_per_sec[0]
        self._draft_slope = max(slower, 0) / max(far_drafts.context_length - near_drafts.context_length, 1)
        self._context = min(curve.context_length for curve in table.curves)
        self._rows = {
            curve.requests: _per_request(curve)
            for curve in sorted(table.curves, key=lambda curve: curve.requests)
            if curve.context_length == self._context
        }
        self._least = min(seconds[0] for _, seconds in self._rows.values())
        tokens, near = self._rows[1]
        last = max((curve for curve in table.curves if curve.requests == 1), key=lambda curve: curve.context_length)
        rise = np.maximum.accumulate(np.maximum(_per_request(last)[1] - near, 0))
        slope = rise / max(last.context_length - self._context, 1)
        self._slopes = np.interp(np.arange(tokens[-1] + 1), tokens, slope)
        self._linear = lru_cache(64)(self._without_attention)
        self._draft = lru_cache(64)(lambda requests: float(np.interp(requests, *self._drafts)))

    def step_seconds(
        self, requests: int, context_length: int, draft_tokens: NDArray[np.int64], longest: NDArray[np.int64]
    ) -> Floats:
        """Time ``[n]`` of steps that verify so many draft tokens beside each request's anchor.

        Args:
            requests: R.
            context_length: Cached tokens that attention reads of each request.
            draft_tokens: Draft tokens that all requests verify together, int64 ``[n]``.
            longest: Most tokens of one request, its anchor included, int64 ``[n]``.
        """
        linear = self._linear(requests, int(draft_tokens.max()))[draft_tokens]
        seconds = linear + requests * max(context_length, self._context) * self._attention(longest)
        return np.asarray(np.maximum(seconds, self._least))  # a sum of large parts that nearly cancel each other

    def draft_seconds(self, requests: int, context_length: int) -> float:
        """Time of drafting for so many requests, of each of which attention reads so many cached tokens."""
        return self._draft(requests) + requests * max(context_length - self._draft_context, 0) * self._draft_slope

    def _without_attention(self, requests: int, draft_tokens: int) -> Floats:
        """Time ``[draft_tokens + 1]`` of steps that verify 0, 1, … draft tokens, but for reading the context."""
        tokens = 1 + np.arange(draft_tokens + 1) / requests  # of each request
        measured = np.array(list(self._rows))
        place = float(np.interp(requests, measured, np.arange(len(measured))))
        below, above = (
            np.interp(tokens, *self._rows[int(measured[index])]) for index in (int(place), int(np.ceil(place)))
        )
        seconds = below + (place - int(place)) * (above - below)
        return np.asarray(np.maximum.accumulate(seconds - requests * self._context * self._attention(tokens)))

    def _attention(self, tokens: NDArray[np.int64] | Floats) -> Floats:
        """Time of reading a token of context with so many tokens of a request."""
        if tokens.dtype.kind == "i":  # looked up: searches ask for thousands at once
            return np.asarray(self._slopes[np.minimum(tokens, len(self._slopes) - 1)])
        return np.asarray(np.interp(tokens, np.arange(len(self._slopes)), self._slopes))


def _per_request(curve: StepCurve) -> tuple[Floats, Floats]:
    """Tokens a request, and the step's seconds made monotone: a step cannot take less time for more tokens."""
    seconds = 1 / np.array(curve.sample_steps_per_sec)
    rising = np.maximum.accumulate(seconds) + np.minimum.accumulate(seconds[::-1])[::-1]
    return np.array(curve.sample_batch_tokens) / curve.requests, rising / 2


def cost_key(bundle: Bundle, provider: Provider | Selection, threads: int | None) -> CostKey:
    """What a table measured here and now would hold for.

    Args:
        bundle: The bundle.
        provider: What runs its graphs.
        threads: Host threads; None stands for one a core.
    """
    selection = provider if isinstance(provider, Selection) else Selection.of(provider)
    device = selection.device_name("target")
    return CostKey(
        device=processor() if device is None else f"{device}, {processor()}",
        provider=selection.label,
        threads=threads or os.cpu_count() or 1,
        precision={name: str(info) for name, info in bundle.manifest.precision.items()},
        files=confidence_files(bundle.manifest),
        versions={"dspark-onnx": version("dspark-onnx"), "onnxruntime": onnxruntime_version()},
    )


def cost_file(bundle: Bundle, key: CostKey) -> Path:
    """Where the table of this key lies."""
    return bundle.file(COST_FOLDER) / key.file_name


def read_costs(bundle: Bundle, key: CostKey) -> CostTable | None:
    """Reads the table that was measured on this device; None if there is none.

    Args:
        bundle: The bundle.
        key: What it has to hold for.

    Raises:
        BundleError: The file is damaged, of another version, or holds for something else.
    """
    file = cost_file(bundle, key)
    table = read_versioned(file, CostTable, COST_VERSION)
    if table is None:
        return None
    here, there = _flat(key), _flat(table.key)
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            raise BundleError(f"{file}: was measured with {name} {there.get(name)}; here it is {here.get(name)}")
    return table


def write_costs(bundle: Bundle, table: CostTable, picture: bytes | None = None) -> Path:
    """Writes a table into the bundle and returns where.

    Args:
        bundle: The bundle.
        table: The table.
        picture: Shows it, as PNG; None removes that of the table it replaces.

    Raises:
        OSError: It cannot be written.
    """
    file = cost_file(bundle, table.key)
    file.parent.mkdir(exist_ok=True)
    write_whole(file, f"{table.model_dump_json(indent=2)}\n".encode())
    drawn = file.with_suffix(".png")
    if picture is None:
        drawn.unlink(missing_ok=True)
    else:
        write_whole(drawn, picture)
    return file


def check_cost_folder(bundle: Bundle) -> None:
    """Makes sure that a table can be written, before one is measured.

    Raises:
        RequestError: The folder of tables cannot be made or written.
    """
    folder = bundle.file(COST_FOLDER)
    try:
        folder.mkdir(exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError(f"{folder}: cannot be written: {one_line(error)}; nothing was measured") from error


def _flat(key: CostKey) -> dict[str, str]:
    """The key's fields, those of its dictionaries one by one."""
    flat: dict[str, str] = {}
    for name, value in key:
        parts = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{name} {part}".strip(): str(each) for part, each in parts}
    return flat
