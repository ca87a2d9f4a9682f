"""Where the time of generation goes."""

from collections import defaultdict
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from time import perf_counter

__all__ = ["PhaseClock"]


class PhaseClock:
    """Adds up the seconds spent in named phases.

    Attributes:
        seconds: Total of each phase.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Counts the time of a block of code under a name."""
        return _Phase(self.seconds, name)


class _Phase:
    """One block of code; a class of its own costs a fraction of a generator, several times per round."""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: MutableMapping[str, float], name: str) -> None:
        self._seconds = seconds
        self._name = name

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += perf_counter() - self._start
