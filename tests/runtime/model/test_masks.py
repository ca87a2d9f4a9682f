"""Attention biases, against the sentences that define them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dspark.runtime.bundle.contract import MASKED
from dspark.runtime.bundle.manifest import CacheInfo
from dspark.runtime.model.masks import causal_bias, new_rows, past_bias, seen_bias


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(9, 12))
def test_a_request_sees_its_cached_tokens(lengths: list[int], capacity: int) -> None:
    bias = past_bias(np.array(lengths), capacity)
    assert (bias.shape, bias.dtype) == ((len(lengths), 1, 1, 1, capacity), np.float32)
    for row, length in zip(bias[:, 0, 0, 0], lengths, strict=True):
        assert row.tolist() == [0.0] * length + [MASKED] * (capacity - length)


def test_the_last_index_is_seen() -> None:
    bias = seen_bias(np.array([[0, 2], [3, -1]]), 4)
    assert (bias == 0).sum(-1).tolist() == [[1, 3], [4, 0]]


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 6))
def test_a_new_token_sees_the_cache_and_new_ones_up_to_itself(requests: int, width: int, capacity: int) -> None:
    bias = causal_bias(requests, width, capacity)
    assert bias.shape == (requests, 1, 1, width, capacity + width)
    for each in bias[:, 0, 0]:
        for token, row in enumerate(each.tolist()):
            assert row == [0.0] * (capacity + token + 1) + [MASKED] * (width - token - 1)


def test_new_rows_have_the_layers_shape() -> None:
    buffer = new_rows(CacheInfo(layers=3, kv_heads=2, head_dim=8), 4, 5)
    assert (buffer.shape, buffer.dtype) == ((3, 2, 4, 2, 5, 8), np.float32)
    assert not buffer.any()
