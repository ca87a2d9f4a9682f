"""Places of flat tokens in the padded form, against loops."""

from hypothesis import given
from hypothesis import strategies as st

from dspark.runtime.model.places import places


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 3))
def test_every_token_has_its_place(counts: list[int], spare: int) -> None:
    width = max(counts) + spare
    found = places(tuple(counts), width)
    tokens = [(request, index) for request, count in enumerate(counts) for index in range(count)]
    assert found.offsets == tuple(sum(counts[:request]) for request in range(len(counts) + 1))
    assert found.owner.tolist() == [request for request, _ in tokens]
    assert found.within.tolist() == [index for _, index in tokens]
    assert found.unpad_index.tolist() == [request * width + index for request, index in tokens]
    assert found.pad_index.shape == (len(counts), width)
    for flat, (request, index) in enumerate(tokens):
        assert found.pad_index[request, index] == flat
    assert all(0 <= flat < len(tokens) for flat in found.pad_index.ravel())  # padding repeats some token
