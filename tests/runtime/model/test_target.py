"""The target: a pass over many tokens."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dspark.runtime import Bundle
from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.target import Target, TokenRun
from tests.support.golden_models import PROMPTS, ids

GoldenBundle = Callable[[str], Path]


def test_a_pass_over_many_tokens_equals_one_token_at_a_time(golden_bundle: GoldenBundle) -> None:
    bundle = Bundle.open(golden_bundle("dspark_vanilla"))
    session = open_sessions(bundle, HostOptions(threads=1), ["target"])["target"]

    def logits(prompt: list[int], passes: list[list[int]]) -> np.ndarray:
        """Of tokens after a prompt, one verification step a pass."""
        target = Target(session, bundle.manifest, KeyValueCache(bundle.manifest.caches, 1), PhaseClock())
        target.commit(0, target.prefill(0, TokenRun(prompt, len(prompt))), 0, len(prompt))
        found = []
        for tokens in passes:
            step = target.verify([TokenRun(tokens, len(prompt))])
            target.commit(0, step, 0, len(tokens))
            found.append(step.scores.rows.copy())
        return np.concatenate(found)

    following = ids("tion o")
    for count in range(1, 7):
        together = logits(PROMPTS[2], [following[:count]])
        one_by_one = logits(PROMPTS[2], [[token] for token in following[:count]])
        assert np.abs(together - one_by_one).max() < 1e-4
    assert np.abs(logits(PROMPTS[2][1:], [following]) - together).max() > 1e-2
