"""The block drafter's graph by itself: the reference's block, for each request from its own context alone."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dspark.runtime import Bundle
from tests.checkpoints import write_deepspec, write_target, write_zlab_dflash
from tests.exporter.graphs.recorded import Array
from tests.reference import ReferenceDrafter, ReferenceTarget
from tests.support.exported import assert_close, export
from tests.support.graph_host import JUNK, MASKED, Host, open_graph

TEXTS = [np.random.default_rng(seed).integers(0, 90, length).tolist() for seed, length in enumerate((20, 7, 13))]
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepspec": (write_deepspec, {}),
    "one-slot": (write_deepspec, {"block_size": 1}),
    "zlab": (write_zlab_dflash, {}),
    "causal": (write_zlab_dflash, {"dflash": {"causal": True}}),
    "window": (write_zlab_dflash, WINDOW),
}


class Drafter:
    """A block drafter with the context that its target computed, and its reference."""

    def __init__(self, folder: Path, kind: str) -> None:
        write, options = KINDS[kind]
        target = write_target(folder / "target")
        drafter = write(folder / "drafter", target, **options)
        self.bundle = export(target, drafter, folder / "bundle", cache_form="delta")
        self.target = ReferenceTarget(target)
        self.reference = ReferenceDrafter(drafter, self.target)
        self._host = Host(self.bundle)
        self._session = open_graph(self.bundle, "drafter")
        manifest = Bundle.open(self.bundle).manifest
        assert manifest.drafter is not None
        self._cache = manifest.drafter.cache

    def draft(self, texts: list[list[int]], spare: int = 0) -> dict[str, Array]:
        """Drafts after each text, whose last token is the anchor; masked cache rows are junk, ``spare`` behind all."""
        lengths = [len(text) - 1 for text in texts]
        cache, capacity = self._cache, max(lengths) + spare
        rows = np.full((2 * cache.layers, len(texts), cache.kv_heads, capacity, cache.head_dim), JUNK, np.float32)
        bias = np.full((len(texts), 1, 1, 1, capacity), MASKED, np.float32)
        for index, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            _, (context,) = self._host.step([self._host.request(text)], [length])
            rows[:, index, :, :length] = context
            bias[index, ..., :length] = 0
        names = [f"context.{layer}.{part}" for layer in range(cache.layers) for part in ("key", "value")]
        feeds = {
            "anchor_ids": np.array([text[-1] for text in texts]),
            "anchor_positions": np.array(lengths),
            "context_bias": bias,
            **dict(zip(names, rows, strict=True)),
        }
        outputs = [each.name for each in self._session.get_outputs()]
        return dict(zip(outputs, self._session.run(outputs, feeds), strict=True))


@pytest.fixture(scope="module", params=KINDS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return Drafter(tmp_path_factory.mktemp(request.param), request.param)


def test_a_batch_is_the_reference_of_each_request(drafter: Drafter) -> None:
    found = drafter.draft(TEXTS)
    for index, text in enumerate(TEXTS):
        taps = drafter.reference.taps(drafter.target.forward(text[:-1])[1])
        expected = drafter.reference.draft(taps, text)
        assert_close(found["hidden"][index], expected.hidden)
        assert_close(found["base_logits"][index], expected.base_logits)


@pytest.mark.parametrize("spare", [1, 64])
def test_masked_rows_are_not_seen(drafter: Drafter, spare: int) -> None:
    expected, found = drafter.draft(TEXTS[:1]), drafter.draft(TEXTS[:1], spare)
    for name, values in expected.items():
        assert_close(found[name], values, 1e-5)


def test_target_and_drafter_share_the_weights_of_context_rows(drafter: Drafter) -> None:
    """The target makes keys and values of its taps with what the drafter makes those of its block with."""
    stored = []
    for graph, prefix in (("target", "drafter."), ("drafter", "")):
        model = onnx.load(drafter.bundle / f"{graph}.onnx", load_external_data=False)
        name = f"{prefix}layers.0.self_attn.kv_proj.weight"
        (weight,) = [each for each in model.graph.initializer if each.name == name]
        stored.append({entry.key: entry.value for entry in weight.external_data})
    assert stored[0] == stored[1]
