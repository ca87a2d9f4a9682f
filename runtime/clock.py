"""Where the time of generation goes."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

__all__ = ["PhaseClock"]


class PhaseClock:
    """Adds up the seconds spent in named phases.

    Attributes:
        seconds: Total of each phase.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of a block of code under a name."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += perf_counter() - start
