"""Requests that wait for a slot: who is next, and when an idle engine starts."""

from collections import deque
from collections.abc import Callable
from threading import Condition
from time import monotonic
from typing import get_args

from dspark.runtime.engine.request import Priority, Request

__all__ = ["RequestQueue"]

PASSED_OVER = 3
"""Interactive requests that may go ahead of one that waits as ``batch``: every fourth place is its own."""


class RequestQueue:
    """First come, first served within a priority; any thread may add requests.

    An interactive request goes ahead of those of priority ``batch``, three times at most: the fourth place belongs to
    the batch request that has waited longest, so none starves. Nobody overtakes who is next until there is room for it,
    so that large requests do not starve either.

    Args:
        min_batch_size: Requests that an idle engine waits for.
        max_delay: Seconds that it waits for them at most, from when the oldest came.
        clock: Tells the seconds.
    """

    def __init__(self, min_batch_size: int = 1, max_delay: float = 0.0, clock: Callable[[], float] = monotonic) -> None:
        self._min_batch_size = min_batch_size
        self._max_delay = max_delay
        self._clock = clock
        self._waiting: dict[Priority, deque[tuple[float, Request]]] = {name: deque() for name in get_args(Priority)}
        self._passed_over = 0
        self._changed = Condition()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, request: Request) -> None:
        """Adds a request."""
        with self._changed:
            self._waiting[request.priority].append((self._clock(), request))
            self._changed.notify_all()

    def remove(self, request: Request) -> bool:
        """Takes a request out, wherever it stands; returns whether it was there."""
        with self._changed:
            queue = self._waiting[request.priority]
            entry = next((entry for entry in queue if entry[1] is request), None)
            if entry is None:
                return False
            queue.remove(entry)
            self._changed.notify_all()
            return True

    def pop(self, fits: Callable[[Request], bool]) -> Request | None:
        """Takes the next request out, if there is one and it fits."""
        with self._changed:
            batch = self._waiting["batch"]
            ahead = self._waiting["interactive"]
            queue = batch if batch and (not ahead or self._passed_over == PASSED_OVER) else ahead
            if not queue or not fits(queue[0][1]):
                return None
            self._passed_over = self._passed_over + 1 if batch and queue is ahead else 0
            return queue.popleft()[1]

    def wait(self) -> None:
        """Blocks while requests are held back: too few of them wait, and the oldest has not waited long enough."""
        with self._changed:
            while (seconds := self._held_for()) > 0:
                self._changed.wait(seconds)

    def _held_for(self) -> float:
        """Seconds until what waits is let go; 0 if nothing waits."""
        if not 0 < len(self) < self._min_batch_size:
            return 0.0
        oldest = min(queue[0][0] for queue in self._waiting.values() if queue)
        return oldest + self._max_delay - self._clock()
