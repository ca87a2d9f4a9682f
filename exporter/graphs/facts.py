"""What a graph's inputs and outputs follow from, read off the description of a checkpoint."""

from dspark.exporter.checkpoints.description import Backbone, ConfidenceInput, Drafter, DrafterKind, Target
from dspark.runtime.bundle.graph_specs import DrafterFacts, TargetFacts
from dspark.runtime.bundle.manifest import CacheForm, CacheInfo

__all__ = ["drafter_facts", "target_facts"]


def target_facts(target: Target, cache_form: CacheForm) -> TargetFacts:
    """Those of a target's graph."""
    return TargetFacts(
        cache_form=cache_form,
        cache=_cache_info(target.backbone),
        vocabulary_size=target.vocabulary_size,
        rope_lengths=target.backbone.rope.dynamic is not None,
    )


def drafter_facts(drafter: Drafter) -> DrafterFacts:
    """Those of a drafter's graphs."""
    return DrafterFacts(
        one_pass=drafter.kind is not DrafterKind.EAGLE3,
        cache=_cache_info(drafter.backbone),
        hidden_size=drafter.backbone.hidden_size,
        draft_length=drafter.draft_length,
        choices=drafter.choices,
        candidates=drafter.top_k is not None,
        confidence=drafter.confidence is not ConfidenceInput.NONE,
    )


def _cache_info(backbone: Backbone) -> CacheInfo:
    return CacheInfo(layers=len(backbone.layers), kv_heads=backbone.kv_head_count, head_dim=backbone.head_dim)
