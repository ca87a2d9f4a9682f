"""The head's graph by itself: sequential heads repair logits as the reference does, and draw from what they return."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import write_deepspec, write_target
from tests.exporter.graphs.head_graph import HIDDEN, SLOTS, Head, draft_ids, probabilities
from tests.reference import ReferenceDrafter, ReferenceTarget
from tests.support.exported import assert_close, export


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_token_is_drawn_from_the_logits_that_are_returned(
    kind: str, reduced: bool, head: Callable[..., Head]
) -> None:
    """A sequential head's logits depend on the tokens drawn before; the draw and the acceptance test read the same."""
    drawn, random = head(300, kind, 400 if reduced else None), np.random.default_rng(3)
    feeds = {"anchor_ids": random.integers(0, 300, 500), "hidden": random.normal(0, 1, (500, SLOTS, HIDDEN))}
    logits = random.normal(0, 1, (500, SLOTS, 300))
    uniform = random.random((500, SLOTS), np.float32)
    temperature = np.full(500, 0.8)
    outputs = drawn.run(logits, uniform, temperature, **feeds)
    chosen = draft_ids(drawn, outputs["tokens"])[..., None]
    cumulative = probabilities(outputs["draft_logits"], temperature).cumsum(axis=-1)
    above = np.take_along_axis(cumulative, chosen, -1)[..., 0]
    assert (uniform <= above + 1e-5).all()
    assert (above - uniform <= 1 + 1e-5).all()
    others = drawn.run(logits, uniform[::-1], temperature, **feeds)
    same = (others["tokens"][:, 0] == outputs["tokens"][:, 0]).nonzero()[0]
    differ = (others["tokens"][:, 0] != outputs["tokens"][:, 0]).nonzero()[0]
    assert_close(others["draft_logits"][same, 1], outputs["draft_logits"][same, 1], 1e-6)
    assert not np.isclose(others["draft_logits"][differ, 1], outputs["draft_logits"][differ, 1]).all(axis=-1).any()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_greedy_chain_is_the_reference(kind: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", vocab_size=300)
    drafter = write_deepspec(tmp_path / "drafter", target, head=kind, block_size=SLOTS, confidence="markov")
    reference = ReferenceDrafter(drafter, ReferenceTarget(target))
    graph = Head(export(target, drafter, tmp_path / "bundle"))
    text = np.random.default_rng(5).integers(0, 290, 20).tolist()
    draft = reference.draft(reference.taps(ReferenceTarget(target).forward(text)[1])[:-1], text)
    feeds = {"hidden": draft.hidden[None], "anchor_ids": np.array(text[-1:])}
    outputs = graph.run(draft.base_logits[None], np.zeros((1, SLOTS)), np.zeros(1), **feeds)
    assert outputs["tokens"][0].tolist() == draft.tokens
    assert_close(outputs["draft_logits"][0], draft.logits)
    assert draft.confidence is not None
    assert_close(outputs["confidence"][0], draft.confidence)
