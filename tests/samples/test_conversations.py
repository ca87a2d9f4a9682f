"""Anchors, and what is read from files."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")


def save(path: Path, ids: object, mask: object) -> Path:
    np.savez(path, ids=np.array(ids, np.uint16), response_mask=np.array(mask, np.uint8))
    return path


def test_files_are_joined_and_filled_up(tmp_path: Path) -> None:
    from conversations import Conversations

    first = save(tmp_path / "a.npz", [[1, 2, 3, 4], [5, 6, 7, 8]], [[0, 1, 1, 0], [0, 0, 0, 1]])
    second = save(tmp_path / "b.npz", [[9, 10, 11, 12, 13]], [[0, 0, 1, 1, 1]])
    read = Conversations.read([first, second])
    assert read.ids.tolist() == [[1, 2, 3, 4, 0], [9, 10, 11, 12, 13]]  # a response of one token has no anchor
    assert read.lengths.tolist() == [3, 5]
    assert read.response_tokens == 5
    assert read.token_counts(16).nonzero().flatten().tolist() == [2, 3, 11, 12, 13]


def test_other_files_are_refused(tmp_path: Path) -> None:
    from conversations import Conversations

    np.savez(tmp_path / "a.npz", ids=np.zeros((2, 3)))
    with pytest.raises(ValueError, match="has no array response_mask"):
        Conversations.read([tmp_path / "a.npz"])
    with pytest.raises(ValueError, match="must be alike"):
        Conversations.read([save(tmp_path / "b.npz", [[1, 2, 3]], [[1, 1]])])


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 100),
)
def test_anchors_against_the_definition(masks: list[list[bool]], count: int, block: int, seed: int) -> None:
    from conversations import sample_anchors

    responses = torch.tensor(masks)
    anchors, valid = sample_anchors(responses, count, block, torch.Generator().manual_seed(seed))
    assert anchors.shape == (len(masks), count)
    for row, mask in enumerate(masks):
        possible = [at for at in range(1, 11) if mask[at] and mask[at + 1]]
        for anchor, slots in zip(anchors[row].tolist(), valid[row].tolist(), strict=True):
            following = [*mask[anchor + 1 :], *[False] * block][:block]
            expected = [anchor in possible and all(following[: slot + 1]) for slot in range(block)]
            assert slots == expected
            assert anchor in possible or not possible
        assert len(set(anchors[row].tolist())) == (min(count, len(possible)) or 1)
        assert anchors[row].tolist() == sorted(anchors[row].tolist())
