"""The continuous-batching engine: one step at a time, whichever thread asks for it.

A request moves from *waiting* (``queue``) through *prefill*, in chunks, to *running* (``round``); requests join and
leave between rounds. Requests may come, be cancelled and be moved on from any thread.
"""

from collections import deque

from dspark.runtime.arguments import check_argument
from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.engine.prefill import Prefill
from dspark.runtime.engine.queue import RequestQueue
from dspark.runtime.engine.request import Request
from dspark.runtime.engine.round import DecodingRound, Speculation
from dspark.runtime.engine.settings import EngineSettings
from dspark.runtime.engine.slots import Slots
from dspark.runtime.engine.turns import Turns
from dspark.runtime.errors import RequestError
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.target import Target

__all__ = ["Engine"]


class Engine:
    """Runs requests to their end, several at a time.

    Args:
        target: The target's graph.
        cache: The cache that it reads.
        speculation: How to draft; None decodes plainly.
        batch_size: Requests that run at once; the cache has as many slots.
        clock: Tells where the time goes.
        settings: How requests are taken in.
    """

    def __init__(
        self,
        target: Target,
        cache: KeyValueCache,
        speculation: Speculation | None,
        batch_size: int,
        clock: PhaseClock,
        settings: EngineSettings,
    ) -> None:
        self._queue = RequestQueue(min(settings.min_batch_size, batch_size), settings.max_queue_delay)
        self._slots = Slots(target, cache, speculation.drafter if speculation else None)
        self._prefill = Prefill(target, cache, self._slots, self._queue, batch_size, settings)
        self._round = DecodingRound(target, cache, self._slots, speculation, clock, settings)
        self._cancelled: deque[Request] = deque()
        self._turns = Turns()
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._queue or self._slots.prefilling or self._slots.running)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: It is none, or the engine is closed.
        """
        check_argument("request", request, Request, "what DSparkInference.request returned")
        if self._closed:
            raise RequestError("the model was closed; load it again")
        self._queue.push(request)
        if self._closed:  # meanwhile, in another thread
            self.cancel(request)

    def step(self) -> list[Request]:
        """Computes some of the prompts that wait, and one round of the running requests.

        While nothing runs, it first waits for a batch as the settings say. Once something runs, whoever comes joins it:
        a step costs little more for one more request, so waiting could only lose. While another thread's step is under
        way, it only waits for that to end.

        Returns:
            The requests that emitted tokens or ended.
        """
        if self._slots.prefilling is None and not self._slots.running:
            self._queue.wait()
        if not self._turns.take_or_wait():
            return []
        try:
            self._drop_cancelled()
            touched = self._prefill.step()
            if self._slots.running:
                touched += [request for request in self._round.run() if request not in touched]
            return touched
        finally:
            self._turns.end()
            self._settle()

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is, if it has not ended; its slot is free at once, or after the step under way."""
        self._cancelled.append(request)
        self._settle()

    def close(self) -> None:
        """Cancels all requests and takes no more."""
        self._closed = True
        self._cancelled.extend(self._queue.waiting)
        self._cancelled.extend(self._slots.running)
        if self._slots.prefilling is not None:
            self._cancelled.append(self._slots.prefilling)
        self._settle()

    def _settle(self) -> None:
        """Carries cancellations out, unless a step is under way, which does so when it ends."""
        while self._cancelled and self._turns.take():
            try:
                self._drop_cancelled()
            finally:
                self._turns.end()

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if request is self._slots.prefilling:
                self._slots.prefilling = None
            elif request in self._slots.running:
                self._slots.leave(request)
            elif not self._queue.remove(request):
                continue  # it has ended already
            request.cancel()
