"""Fixtures of the graphs' tests."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.checkpoints import write_deepspec, write_speculators, write_target
from tests.exporter.graphs.head_graph import HIDDEN, SLOTS, Head
from tests.support.exported import export


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Head]:
    """Exports a head for a vocabulary size; with a ``target_size`` the vocabulary is a reduced one."""

    @cache
    def head(size: int, kind: str = "none", target_size: int | None = None) -> Head:
        folder = tmp_path_factory.mktemp("head")
        layers = {"num_hidden_layers": 2, "head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
        whole = {"vocab_size": target_size or max(size, 100), "hidden_size": HIDDEN, **layers}
        target = write_target(folder / "target", eos_token_id=0, **whole)
        options = {"block_size": SLOTS, "layers": 1, "taps": [0], "rank": 4, "head": kind, "confidence": "none"}
        if target_size is None and size >= 100:
            drafter = write_deepspec(folder / "drafter", target, **options)
        else:
            drafter = write_speculators(folder / "drafter", target, draft_vocab=size, **options)
        return Head(export(target, drafter, folder / "bundle"))

    return head
