"""How an engine takes requests in."""

from dataclasses import dataclass, replace

__all__ = ["EngineSettings"]


@dataclass(frozen=True)
class EngineSettings:
    """How an engine takes requests in; the defaults bind nothing.

    Attributes:
        min_batch_size: Requests that an idle engine waits for before it starts.
        max_queue_delay: Seconds that it waits for them at most.
        prefill_tokens: Prompt tokens a step computes at most; None takes ``engine.PREFILL_CHUNK``.
        step_tokens: Tokens a verification step carries at most, drafts and the last token of every request together.
            Each request may draft an equal share; its last token is computed in any case.
        cache_tokens: Tokens that the texts of all admitted requests may come to at most.
    """

    min_batch_size: int = 1
    max_queue_delay: float = 0.0
    prefill_tokens: int | None = None
    step_tokens: int | None = None
    cache_tokens: int | None = None

    @property
    def alone(self) -> "EngineSettings":
        """For who submits all that there is before every step: it would wait in vain for more."""
        return replace(self, min_batch_size=1)
