"""Takes requests in: computes prompts in chunks, as many tokens per step as the settings allow."""

from dspark.runtime.cache.key_value_cache import TARGET, KeyValueCache
from dspark.runtime.engine.queue import RequestQueue
from dspark.runtime.engine.request import Request
from dspark.runtime.engine.settings import EngineSettings
from dspark.runtime.engine.slots import Slots
from dspark.runtime.model.target import Target, TokenRun

__all__ = ["PREFILL_CHUNK", "Prefill"]

PREFILL_CHUNK = 128
"""Prompt tokens per step, if nothing else is set: bounds attention's memory and the wait of running requests."""


class Prefill:
    """Moves requests from the queue to running.

    Args:
        target: Computes prompts.
        cache: Tells how much of a prompt is computed.
        slots: Where requests go.
        queue: Where they come from.
        batch_size: Requests that run at once.
        settings: How many tokens a step computes, and how many the cache may come to.
    """

    def __init__(
        self,
        target: Target,
        cache: KeyValueCache,
        slots: Slots,
        queue: RequestQueue,
        batch_size: int,
        settings: EngineSettings,
    ) -> None:
        self._target = target
        self._cache = cache
        self._slots = slots
        self._queue = queue
        self._batch_size = batch_size
        self._settings = settings

    def step(self) -> list[Request]:
        """Computes prompts up to the step's limit; returns the requests whose first token is decided."""
        started, budget = [], self._settings.prefill_tokens or PREFILL_CHUNK
        while budget > 0:
            if self._slots.prefilling is None and len(self._slots.running) < self._batch_size:
                waiting = self._queue.pop(self._fits)
                if waiting is not None:
                    self._slots.begin(waiting)
            request = self._slots.prefilling
            if request is None:
                break
            budget -= self._compute(request, budget)
            if request.output_ids or request.finish_reason is not None:
                started.append(request)
                self._slots.join()
        return started

    def _fits(self, request: Request) -> bool:
        """Whether the cache has room for all that this and the running requests may come to."""
        limit = self._settings.cache_tokens
        return limit is None or sum(each.most_tokens for each in (request, *self._slots.running)) <= limit

    def _compute(self, request: Request, most: int) -> int:
        """Computes the next tokens of a prompt, ``most`` at most; returns how many."""
        most = min(most, self._target.most_prompt_tokens or most)
        slot = len(self._slots.running)
        prompt = request.prompt_ids
        start = int(self._cache.lengths[TARGET, slot])
        chunk = prompt[start : start + most]
        following = prompt[start + 1 : start + 1 + len(chunk)]
        try:
            verification = self._target.prefill(slot, TokenRun(chunk, len(prompt)))
            if len(following) < len(chunk):
                following += request.emit([request.sampler.next_token(verification.scores)])
        except Exception as error:  # a graph may fail on this prompt alone, and a third party's in any way
            self._slots.fail(slot, request, error)
            return len(chunk)
        self._slots.commit(slot, verification, 0, following)
        return len(chunk)
