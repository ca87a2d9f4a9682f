"""A bundle's loaded graphs over one cache."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dspark.providers.session import Session
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.cache.allocation import common_allocator
from dspark.runtime.cache.key_value_cache import KeyValueCache, make_cache
from dspark.runtime.model.block_drafter import BlockDrafter
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.drafter import Drafter
from dspark.runtime.model.eagle3_drafter import Eagle3Drafter
from dspark.runtime.model.target import Target

__all__ = ["ModelGraphs"]


@dataclass(frozen=True)
class ModelGraphs:
    """What an engine computes with.

    Attributes:
        cache: Keys and values of all slots.
        target: The target over it.
        drafter: The drafter over it; None if the bundle has none, or its graphs are not loaded.
    """

    cache: KeyValueCache
    target: Target
    drafter: Drafter | None

    @classmethod
    def of(cls, bundle: Bundle, sessions: Mapping[str, Session], slots: int, clock: PhaseClock) -> "ModelGraphs":
        """Binds loaded graphs to a new cache.

        Args:
            bundle: The bundle.
            sessions: Its graphs, by name; of the target alone if nothing is drafted.
            slots: Requests that the cache has room for.
            clock: Tells the time spent in each graph.
        """
        manifest = bundle.manifest
        cache = make_cache(manifest, sessions, slots)
        info, head, shapes = manifest.drafter, manifest.head, manifest.shapes
        if info is None or "drafter" not in sessions:
            return cls(cache, Target(sessions["target"], manifest, cache, clock), None)
        # The host does not look at features that both graphs can leave on their device.
        allocate = common_allocator([sessions["target"], sessions["drafter"]], np.zeros)
        target = Target(sessions["target"], manifest, cache, clock, allocate)
        vocabulary = bundle.draft_vocabulary()
        if info.kind == "eagle3":
            return cls(
                cache, target, Eagle3Drafter(sessions["drafter"], info, vocabulary, cache, clock, shapes, allocate)
            )
        assert head is not None
        batch = None if shapes is None else shapes.batch
        drafter = BlockDrafter(sessions["drafter"], sessions["head"], info, head, vocabulary, cache, clock, batch)
        return cls(cache, target, drafter)
