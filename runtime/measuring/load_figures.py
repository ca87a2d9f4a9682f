"""What a load benchmark runs and finds: its settings, the measurements of a cell, and the report."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np
from pydantic import BaseModel, ConfigDict

from dspark.runtime.engine.request import Request

__all__ = ["CONCURRENCIES", "CellMeasurements", "LoadCell", "LoadReport", "LoadSettings", "Percentiles"]

CONCURRENCIES = (1, 2, 4, 8, 16, 32)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class LoadSettings(_Model):
    """What a load benchmark runs.

    Attributes:
        schedulers: Names, ``fixed:3`` for a length and ``threshold:0.5`` for a threshold; None: all that the bundle
            allows.
        concurrencies: Numbers of users.
        max_new_tokens: Tokens generated a prompt at most.
        requests_per_user: Requests that every user sends in a turn.
        repeats: Times that every concurrency is measured, each with the next prompts of the file.
        threads: Host threads; None: one a core.
        profile: A serving profile, by name or file.
        providers: What runs the graphs, as after ``--provider``.
        allow_fallback: Whether nodes that a device cannot run may run on the host.
    """

    schedulers: tuple[str, ...] | None = None
    concurrencies: tuple[int, ...] = CONCURRENCIES
    max_new_tokens: int = 96
    requests_per_user: int = 2
    repeats: int = 1
    threads: int | None = None
    profile: str | None = None
    providers: tuple[str, ...] = ("cpu",)
    allow_fallback: bool = False


class Percentiles(_Model):
    """Seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles | None":
        """The percentiles of some times; None if there are none."""
        if not seconds:
            return None
        p50, p99 = np.percentile(seconds, (50, 99))
        return cls(p50=float(p50), p99=float(p99))


class LoadCell(_Model):
    """One scheduler at one concurrency; None is what could not be observed, as all answers were too short.

    Attributes:
        scheduler: As in the settings.
        concurrency: Users.
        requests: Requests that ended.
        tokens_per_second: Of all users together, while all of them had a request under way, prompts included.
        tokens_per_second_per_user: Of the median request, from its first token on.
        time_to_first_token: From when a request was made.
        time_between_tokens: A token's wait after the one before it; the tokens of one round share its time evenly.
        verified_tokens: Draft tokens verified, a request and round; 0 if all decode plainly.
        acceptance_length: Tokens emitted, a request and round.
    """

    scheduler: str
    concurrency: int
    requests: int
    tokens_per_second: float
    tokens_per_second_per_user: float | None
    time_to_first_token: Percentiles | None
    time_between_tokens: Percentiles | None
    verified_tokens: float | None
    acceptance_length: float | None


class LoadReport(_Model):
    """What a load benchmark found.

    Attributes:
        bundle: Name of its folder.
        target: Name of the target model.
        precision: Precision of each graph.
        prompts: Prompts in the file; they are sent in turn.
        settings: What was run.
        cells: By concurrency, then by scheduler.
    """

    bundle: str
    target: str
    precision: dict[str, str]
    prompts: int
    settings: LoadSettings
    cells: list[LoadCell]


@dataclass
class CellMeasurements:
    """Measurements of one scheduler at one concurrency.

    Attributes:
        tokens: Emitted while all users had a request under way.
        seconds: How long they had.
        ended: Requests that ended.
        firsts: Seconds from when each request was made to its first token.
        speeds: Tokens a second of each request, from its first token on.
        gaps: Seconds before each token but the first.
    """

    tokens: int = 0
    seconds: float = 0.0
    ended: list[Request] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def cell(self, scheduler: str, concurrency: int) -> LoadCell:
        """The figures of one scheduler at one number of users."""
        stats = [request.stats for request in self.ended]
        rounds = sum(each.rounds for each in stats)
        return LoadCell(
            scheduler=scheduler,
            concurrency=concurrency,
            requests=len(self.ended),
            tokens_per_second=self.tokens / self.seconds,
            tokens_per_second_per_user=median(self.speeds) if self.speeds else None,
            time_to_first_token=Percentiles.of(self.firsts),
            time_between_tokens=Percentiles.of(self.gaps),
            verified_tokens=sum(sum(each.draft_lengths) for each in stats) / rounds if rounds else None,
            acceptance_length=1 + sum(sum(each.accepted_lengths) for each in stats) / rounds if rounds else None,
        )

    def end(self, request: Request, seen: Sequence[tuple[float, int]]) -> None:
        """Takes in a request that ended, and when it had how many tokens: none when it was made, and so on."""
        self.ended.append(request)
        (made, _), (first, one), *_ = seen
        self.firsts.append(first - made)
        for (before, fewer), (now, tokens) in pairwise(seen[1:]):
            if tokens > fewer:
                self.gaps += [(now - before) / (tokens - fewer)] * (tokens - fewer)
        last, tokens = seen[-1]
        if last > first:
            self.speeds.append((tokens - one) / (last - first))
