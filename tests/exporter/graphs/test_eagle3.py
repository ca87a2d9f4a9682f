"""The EAGLE-3 drafter's graph by itself: the reference's drafts, however committed tokens reach its cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.runtime import Bundle
from tests.checkpoints import write_eagle3, write_target
from tests.exporter.graphs.recorded import Array
from tests.reference import ReferenceDrafter, ReferenceTarget
from tests.support.exported import assert_close, export
from tests.support.graph_host import JUNK, MASKED, Host, open_graph

TEXTS = [np.random.default_rng(seed).integers(0, 90, length).tolist() for seed, length in enumerate((20, 9, 13))]
KINDS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "norms-before": {"norm_before_residual": True, "norm_before_fc": True},
    "fc-norm": {"fc_norm": True},
    "normed-feature": {"norm_output": True},
    "reduced-vocabulary": {"draft_vocab": 60},
    "deepspec": {"layout": "deepspec", "taps": [0, 1, 2]},
    "window": {
        **{"layout": "deepspec", "taps": [0, 1, 2], "layer_types": ["sliding_attention"]},
        **{"sliding_window": 2, "use_sliding_window": True},
    },
    "one-step": {"steps": 1},
}


class Drafter:
    """An EAGLE-3 drafter's graph, its own cache, and its reference."""

    def __init__(self, folder: Path, kind: str) -> None:
        target = write_target(folder / "target")
        drafter = write_eagle3(folder / "drafter", target, **KINDS[kind])
        bundle = export(target, drafter, folder / "bundle", cache_form="delta")
        self.target = ReferenceTarget(target)
        self.reference = ReferenceDrafter(drafter, self.target)
        self._host = Host(bundle)
        self._session = open_graph(bundle, "drafter")
        manifest = Bundle.open(bundle).manifest
        assert manifest.drafter is not None
        self._info = manifest.drafter

    def features(self, text: list[int]) -> Array:
        """The target's features ``[n − 1, H]`` of all tokens but the anchor."""
        _, (features,) = self._host.step([self._host.request(text)], [len(text) - 1])
        return features

    def extend(
        self, texts: list[list[int]], starts: list[int], counts: list[int], cached: list[Array], spare: int = 0
    ) -> dict[str, Array]:
        """Takes ``counts`` tokens of each text from ``starts`` on over the cached rows, and drafts after the last."""
        cache, batch, width = self._info.cache, len(texts), max(counts)
        capacity = max(starts) + spare
        past = np.full((2 * cache.layers, batch, cache.kv_heads, capacity, cache.head_dim), JUNK, np.float32)
        bias = np.full((batch, 1, 1, width, capacity + width), MASKED, np.float32)
        ids, positions = np.zeros((2, batch, width), np.int64)
        features = np.full((batch, width, self._info.hidden_size), JUNK, np.float32)
        for index, (text, start, count) in enumerate(zip(texts, starts, counts, strict=True)):
            past[:, index, :, :start] = cached[index]
            bias[index, ..., :start] = 0
            bias[index, 0, 0, :, capacity:] = np.triu(np.full((width, width), MASKED), 1)
            ids[index, :count] = text[start + 1 : start + count + 1]
            features[index, :count] = self.features(text)[start : start + count]
            positions[index] = start + np.arange(width)
        names = [f"context.{layer}.{part}" for layer in range(cache.layers) for part in ("key", "value")]
        feeds = {
            "input_ids": ids,
            "features": features,
            "position_ids": positions,
            "last_index": np.array(counts) - 1,
            "attention_bias": bias,
            "uniform": np.zeros((batch, self._info.draft_length), np.float32),
            "temperature": np.zeros(batch, np.float32),
            **dict(zip(names, past, strict=True)),
        }
        outputs = [each.name for each in self._session.get_outputs()]
        return dict(zip(outputs, self._session.run(outputs, feeds), strict=True))

    def empty(self) -> Array:
        """No cached rows, ``[2 · layers, Hkv, 0, D]``."""
        cache = self._info.cache
        return np.zeros((2 * cache.layers, cache.kv_heads, 0, cache.head_dim), np.float32)

    def rows(self, outputs: dict[str, Array], index: int, count: int) -> Array:
        """The rows ``[2 · layers, Hkv, count, D]`` that a request got."""
        names = [f"new.{layer}.{part}" for layer in range(self._info.cache.layers) for part in ("key", "value")]
        return np.array([outputs[name][index, :, :count] for name in names])


@pytest.fixture(scope="module", params=KINDS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return Drafter(tmp_path_factory.mktemp(request.param), request.param)


def assert_drafts(drafter: Drafter, outputs: dict[str, Array], texts: list[list[int]]) -> None:
    """Every request's draft is the reference's after its text."""
    for index, text in enumerate(texts):
        expected = drafter.reference.draft(drafter.reference.taps(drafter.target.forward(text[:-1])[1]), text)
        assert outputs["tokens"][index].tolist() == expected.tokens
        assert_close(outputs["draft_logits"][index], expected.logits)


def test_whole_texts_of_different_lengths(drafter: Drafter) -> None:
    """What follows a request's last token is padding with junk for features."""
    counts = [len(text) - 1 for text in TEXTS]
    outputs = drafter.extend(TEXTS, [0, 0, 0], counts, [drafter.empty()] * 3)
    assert_drafts(drafter, outputs, TEXTS)


@pytest.mark.parametrize("spare", [0, 64])
def test_what_is_cached_is_as_if_it_came_at_once(drafter: Drafter, spare: int) -> None:
    """Requests that have cached different numbers of tokens, before rows of junk."""
    counts, begins = [len(text) - 1 for text in TEXTS], [11, 6, 1]
    cached = [
        drafter.rows(drafter.extend([text], [0], [begin], [drafter.empty()]), 0, begin)
        for text, begin in zip(TEXTS, begins, strict=True)
    ]
    rest = [count - begin for count, begin in zip(counts, begins, strict=True)]
    outputs = drafter.extend(TEXTS, begins, rest, cached, spare)
    assert_drafts(drafter, outputs, TEXTS)
    whole = drafter.extend(TEXTS, [0, 0, 0], counts, [drafter.empty()] * 3)
    for index, count in enumerate(counts):
        joined = np.concatenate([cached[index], drafter.rows(outputs, index, rest[index])], axis=2)
        assert_close(joined, drafter.rows(whole, index, count), 1e-5)
