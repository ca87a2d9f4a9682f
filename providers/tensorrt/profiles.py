"""Optimisation profiles: for which shapes an engine is built, and for which it is tuned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

__all__ = ["Dimensions", "Limits", "Profile", "Range", "profiles"]

Dimensions = tuple[int | str, ...]
"""A graph input's shape: numbers and symbols of the contract (ARCHITECTURE.md, "The graphs"), also sums such as S+T."""


@dataclass(frozen=True)
class Range:
    """Values of a dimension.

    Attributes:
        low: The least.
        best: What kernels are chosen for.
        high: The most.
    """

    low: int
    best: int
    high: int

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.best + other.best, self.high + other.high)


@dataclass(frozen=True)
class Limits:
    """The most that an engine is built for.

    Attributes:
        batch: Requests that run at once.
        draft_tokens: Draft tokens verified a round; 0 without a drafter.
        chunk: Prompt tokens that a step computes.
        extension: Committed tokens that an EAGLE-3 drafter takes at once.
        capacity: Tokens that a slot of the cache has room for.
    """

    batch: int
    draft_tokens: int
    chunk: int
    extension: int
    capacity: int


@dataclass(frozen=True)
class Profile:
    """Ranges of the symbols for one kind of step.

    Attributes:
        name: The kind.
        ranges: A range a symbol.
    """

    name: str
    ranges: Mapping[str, Range]

    def shapes(self, dimensions: Dimensions) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The least, best and largest shape of an input."""
        ranges = [self._range(dimension) for dimension in dimensions]
        return tuple(r.low for r in ranges), tuple(r.best for r in ranges), tuple(r.high for r in ranges)

    def _range(self, dimension: int | str) -> Range:
        if isinstance(dimension, int):
            return Range(dimension, dimension, dimension)
        return reduce(add, (self.ranges[symbol] for symbol in dimension.split("+")))


def profiles(inputs: Sequence[Dimensions], limits: Limits) -> tuple[Profile, ...]:
    """The profiles of a graph, the narrowest first: whoever has a shape takes the first that allows it.

    A graph without T takes one; an EAGLE-3 drafter two, for a round and for what follows a prompt; a target three, for
    decoding, verification and prefill. Kernels are tuned for one request, whole drafts and whole chunks.

    Args:
        inputs: Dimensions of the graph's inputs, which tell its kind.
        limits: The most that it is built for.
    """
    symbols = {symbol for dimensions in inputs for each in dimensions for symbol in str(each).split("+")}
    batch, cache = _up_to(limits.batch, 1), _up_to(limits.capacity, 1024)
    drafted = 1 + limits.draft_tokens
    if "T" not in symbols:
        return (Profile("draft", {"B": batch, "S": cache} if "S" in symbols else {"B": batch}),)
    if "N" not in symbols:
        return tuple(
            Profile(name, {"B": batch, "T": _up_to(most), "S": cache})
            for name, most in (("draft", drafted), ("extension", limits.extension))
        )
    if "S" not in symbols:  # fixed in the graph
        cache = Range(limits.capacity, limits.capacity, limits.capacity)
    decode = Profile("decode", {"B": batch, "T": _up_to(1), "S": cache, "N": batch, "K": batch})
    flat = Range(1, drafted, limits.batch * drafted)
    verify = Profile("verify", {"B": batch, "T": _up_to(drafted), "S": cache, "N": flat, "K": flat})
    chunk = _up_to(limits.chunk)
    scored = _up_to(limits.chunk, 1)  # one token's logits, but a whole chunk's when bundles are compared
    prefill = Profile("prefill", {"B": _up_to(1), "T": chunk, "S": cache, "N": chunk, "K": scored})
    return (decode, verify, prefill) if limits.draft_tokens else (decode, prefill)


def _up_to(high: int, best: int | None = None) -> Range:
    return Range(1, high if best is None else min(best, high), high)
