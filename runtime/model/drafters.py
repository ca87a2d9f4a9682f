"""Which drafter a bundle has."""

from collections.abc import Mapping

from dspark.providers.session import Session
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.model.block_drafter import BlockDrafter
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.drafter import Drafter
from dspark.runtime.model.eagle3_drafter import Eagle3Drafter

__all__ = ["make_drafter"]


def make_drafter(bundle: Bundle, sessions: Mapping[str, Session], cache: KeyValueCache, clock: PhaseClock) -> Drafter:
    """The drafter of a bundle that has one, over its loaded graphs."""
    info, head, vocabulary = bundle.manifest.drafter, bundle.manifest.head, bundle.draft_vocabulary()
    assert info is not None
    shapes = bundle.manifest.shapes
    if info.kind == "eagle3":
        return Eagle3Drafter(sessions["drafter"], info, vocabulary, cache, clock, shapes)
    assert head is not None
    batch = None if shapes is None else shapes.batch
    return BlockDrafter(sessions["drafter"], sessions["head"], info, head, vocabulary, cache, clock, batch)
