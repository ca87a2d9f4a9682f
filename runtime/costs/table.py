"""``cost/<device>.json``: what steps and drafts of a bundle cost on a device, as measured there.

A table holds for one device, provider, number of threads, precision, set of files and set of versions: its key. One
with another key is not used.
"""

import re
import reprlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["CostKey", "CostTable", "DraftCurve", "StepCurve"]

COST_VERSION = 2

Count = Annotated[int, Field(ge=1, le=1 << 20)]
Context = Annotated[int, Field(ge=1, le=1 << 30)]
Rate = Annotated[float, Field(ge=1e-6, le=1e12)]
"""Times per second: from one in eleven days to more than a clock can tell."""


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
        sample_steps_per_sec: Steps per second, each of so many tokens; the median of several.
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
        sample_drafts_per_sec: Drafts per second, each for so many requests; the median of several.
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
        brief: Whether little time was spent on it; it then lies beside the thorough one, if there is one.
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
