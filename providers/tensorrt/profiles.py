"""Optimisation profiles: for which shapes an engine is built, and for which it is tuned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from dspark.providers.errors import ProviderError
from dspark.providers.session import SessionLimits

__all__ = ["Profile", "Range", "SymbolicShape", "profiles"]

SymbolicShape = tuple[int | str, ...]
"""A graph input's shape: numbers and symbols (docs/reference/graphs.md), also sums such as S+T."""


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
class Profile:
    """Ranges of the symbols for one kind of step.

    Attributes:
        name: The kind.
        ranges: One range per symbol.
    """

    name: str
    ranges: Mapping[str, Range]

    def shapes(self, shape: SymbolicShape) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The least, best and largest shape of an input."""
        ranges = [self._range(dimension) for dimension in shape]
        return tuple(r.low for r in ranges), tuple(r.best for r in ranges), tuple(r.high for r in ranges)

    def _range(self, dimension: int | str) -> Range:
        if isinstance(dimension, int):
            return Range(dimension, dimension, dimension)
        return reduce(add, (self.ranges[symbol] for symbol in dimension.split("+")))


def profiles(inputs: Sequence[SymbolicShape], limits: SessionLimits, draft_tokens: int) -> tuple[Profile, ...]:
    """The profiles of a graph, the narrowest first: the first that allows a shape is taken.

    A graph without T takes one; an EAGLE-3 drafter two, for a round and for what follows a prompt; a target three, for
    decoding, verification and prefill. Kernels are tuned for one request, whole drafts and whole chunks.

    Args:
        inputs: The shapes of the graph's inputs, which tell its kind.
        limits: The largest calls; those of the graph's own symbols must be there.
        draft_tokens: Tokens of a draft; 0 without a drafter.

    Raises:
        ProviderError: A limit is missing.
    """
    symbols = {symbol for shape in inputs for each in shape for symbol in str(each).split("+")}
    batch = _up_to(_limit(limits, "requests"), 1)
    if "T" not in symbols and "S" not in symbols:
        return (Profile("draft", {"B": batch}),)
    capacity = _limit(limits, "cache_tokens")
    cache = _up_to(capacity, 1024)
    if "T" not in symbols:
        return (Profile("draft", {"B": batch, "S": cache}),)
    width = _limit(limits, "tokens_per_request")
    if "N" not in symbols:
        return tuple(
            Profile(name, {"B": batch, "T": _up_to(most), "S": cache})
            for name, most in (("draft", 1 + draft_tokens), ("extension", width))
        )
    if "S" not in symbols:  # fixed in the graph
        cache = Range(capacity, capacity, capacity)
    decode = Profile("decode", {"B": batch, "T": _up_to(1), "S": cache, "N": batch, "K": batch})
    flat = Range(1, width, batch.high * width)
    verify = Profile("verify", {"B": batch, "T": _up_to(width), "S": cache, "N": flat, "K": flat})
    most = _limit(limits, "prompt_tokens")
    chunk, scored = _up_to(most), _up_to(most, 1)  # one token's logits, but a whole chunk's when bundles are compared
    prefill = Profile("prefill", {"B": _up_to(1), "T": chunk, "S": cache, "N": chunk, "K": scored})
    return (decode, verify, prefill) if width > 1 else (decode, prefill)


def _limit(limits: SessionLimits, name: str) -> int:
    most: int | None = getattr(limits, name)
    if most is None:
        raise ProviderError(f"an engine is built for calls of limited size; {name} has no limit")
    return most


def _up_to(high: int, best: int | None = None) -> Range:
    return Range(1, high if best is None else min(best, high), high)
