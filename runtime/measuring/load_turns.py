"""Users who keep requests under way, and engines that take their steps side by side."""

from collections.abc import Iterable, Iterator
from itertools import islice
from time import perf_counter

from dspark.runtime.engine.engine import Engine
from dspark.runtime.engine.request import Request
from dspark.runtime.measuring.load_figures import CellMeasurements

__all__ = ["Turn", "side_by_side"]


class Turn:
    """Keeps as many requests under way in an engine as there are users, until there are no more.

    Args:
        engine: The engine.
        supply: The requests.
        users: How many there are under way.
        load: Takes the measurements.

    Attributes:
        seconds: What its steps have taken so far: its clock, which stands still while other engines work.
    """

    def __init__(self, engine: Engine, supply: Iterator[Request], users: int, load: CellMeasurements) -> None:
        self.seconds = 0.0
        self._engine = engine
        self._supply = supply
        self._users = users
        self._load = load
        self._full = True
        self._seen: dict[Request, list[tuple[float, int]]] = {}
        """Of the requests under way: when they had how many tokens."""
        self._refill()

    @property
    def done(self) -> bool:
        """Whether all requests have ended."""
        return not self._seen

    def step(self) -> int:
        """Takes a step; returns how many requests ended."""
        start = perf_counter()
        touched = self._engine.step()
        took = perf_counter() - start
        self.seconds += took
        self._load.seconds += self._full * took
        ended = 0
        for request in touched:
            if request.failure is not None:
                raise request.failure
            seen, tokens = self._seen[request], len(request.output_ids)
            self._load.tokens += self._full * (tokens - seen[-1][1])
            seen.append((self.seconds, tokens))
            if request.finish_reason is not None:
                self._load.end(request, self._seen.pop(request))
                ended += 1
        self._refill()
        return ended

    def _refill(self) -> None:
        for request in islice(self._supply, self._users - len(self._seen)):
            self._seen[request] = [(self.seconds, 0)]
            self._engine.submit(request)
        self._full &= len(self._seen) == self._users


def side_by_side(turns: Iterable[Turn]) -> Iterator[int]:
    """Takes all steps of all turns, always of the one that is behind; yields how many requests ended."""
    while turns := [turn for turn in turns if not turn.done]:
        yield min(turns, key=lambda turn: turn.seconds).step()
