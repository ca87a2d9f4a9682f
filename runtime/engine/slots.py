"""Who is where in the cache: running requests, and the one whose prompt is being computed."""

import logging
from collections.abc import Sequence

from dspark.providers.errors import one_line
from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.engine.request import Request
from dspark.runtime.errors import DSparkError, ProviderError
from dspark.runtime.model.drafter import Drafter
from dspark.runtime.model.target import Target, Verification

__all__ = ["Slots"]

logger = logging.getLogger(__name__)


class Slots:
    """Running requests fill the cache's slots 0…R − 1; the request whose prompt is being computed has slot R.

    Args:
        target: Keeps the rows of what it computed.
        cache: Has a slot for each request.
        drafter: Follows along; None if nothing is drafted.

    Attributes:
        running: The running requests, in the order of their slots.
        prefilling: The request in slot R; None if there is none.
    """

    def __init__(self, target: Target, cache: KeyValueCache, drafter: Drafter | None) -> None:
        self.running: list[Request] = []
        self.prefilling: Request | None = None
        self._target = target
        self._cache = cache
        self._drafter = drafter

    def begin(self, request: Request) -> None:
        """Gives slot R to a request, with the rows that it brings along."""
        slot = len(self.running)
        self.prefilling = request
        self._cache.truncate(slot, 0)
        if request.prefix is not None:
            self._cache.copy(slot, request.prefix, 0)
        if self._drafter is not None:
            self._drafter.begin(slot)

    def join(self) -> None:
        """Makes the request in slot R a running one, unless it has ended already."""
        assert self.prefilling is not None
        request, self.prefilling = self.prefilling, None
        self.running.append(request)
        if request.finish_reason is not None:
            self.leave(request)

    def commit(self, slot: int, verification: Verification, index: int, following: Sequence[int]) -> None:
        """Keeps the rows of the tokens before ``following``; the rest of the step is forgotten."""
        self._target.commit(slot, verification, index, len(following))
        if self._drafter is not None:
            self._drafter.commit(slot, verification, index, following)

    def fail(self, slot: int, request: Request, error: Exception) -> None:
        """Ends a request that cannot go on, and leaves no values in the cache that are not finite."""
        request.fail(_told(error))
        self._cache.clear_tail(slot)

    def leave(self, request: Request) -> None:
        """Frees a running request's slot and closes the gap."""
        slot, last = self.running.index(request), len(self.running) - 1
        if request.keep_cache and request.failure is None:
            request.cache = self._cache.extract(slot)
        if slot != last:
            self._move(slot, last)
            self.running[slot] = self.running[last]
        self.running.pop()
        if self.prefilling is not None:
            self._move(last, last + 1)
        else:
            self._cache.truncate(last, 0)
        self._cache.trim()

    def leave_ended(self, requests: Sequence[Request]) -> None:
        """Frees the slots of those that have ended."""
        for request in requests:
            if request.finish_reason is not None:
                self.leave(request)

    def _move(self, slot: int, source: int) -> None:
        self._cache.copy(slot, self._cache, source)
        self._cache.truncate(source, 0)
        if self._drafter is not None:
            self._drafter.move(slot, source)


def _told(error: Exception) -> DSparkError:
    """An error of ours; others come from a provider's library, or from a fault that a log should show whole."""
    if isinstance(error, DSparkError):
        return error
    logger.error("a graph call failed", exc_info=error)
    return ProviderError(f"a graph call failed: {type(error).__name__}: {one_line(error)}")
