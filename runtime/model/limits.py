"""How large the calls of a bundle's graphs may be: what the model allows, its fixed shapes, and what was compiled."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dspark.providers.session import Session, SessionLimits, limits_of
from dspark.runtime.bundle.manifest import Manifest

__all__ = ["MOST_REQUESTS", "ModelLimits"]

MOST_REQUESTS = 1024


@dataclass(frozen=True)
class ModelLimits:
    """The largest batch, draft and text that the engine may ask for.

    Attributes:
        requests: Requests that run at once.
        draft_tokens: Draft tokens of one request that a step verifies; None: any number.
        context_length: Tokens of the longest text, prompt and output together.
        reason: What bounds the number of requests, for errors; empty if nothing of this bundle does.
    """

    requests: int
    draft_tokens: int | None
    context_length: int
    reason: str = ""

    @classmethod
    def of(cls, manifest: Manifest, sessions: Mapping[str, Session] | None = None) -> "ModelLimits":
        """The limits of a bundle, and of its loaded graphs if there are any yet."""
        stated = {name: limits_of(session) for name, session in (sessions or {}).items()}
        shapes = manifest.shapes
        fixed = MOST_REQUESTS if shapes is None else shapes.batch
        compiled = _least(MOST_REQUESTS, (limits.requests for limits in stated.values()))
        reason = ""
        if min(fixed, compiled) < MOST_REQUESTS:
            which = "fixed shapes" if fixed <= compiled else "compiled graphs"
            reason = f", which the bundle's {which} are for"
        target = stated.get("target", SessionLimits())
        # Every cached token must find a row, and so must a draft that is verified after the last but one.
        drafted = manifest.drafter.draft_length if manifest.drafter else 0
        rows = None if target.cache_tokens is None else target.cache_tokens - drafted
        return cls(
            requests=min(fixed, compiled),
            draft_tokens=None if target.tokens_per_request is None else target.tokens_per_request - 1,
            context_length=_least(manifest.context_length, [rows]),
            reason=reason,
        )


def _least(limit: int, others: Iterable[int | None]) -> int:
    return min([limit, *(other for other in others if other is not None)])
