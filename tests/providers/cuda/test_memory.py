"""Arrays in a device's memory."""

import gc
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.providers import ProviderError
from dspark.providers.cuda.memory import Cuda, CudaArray
from dspark.providers.session import Index
from tests.support import fake_cuda

VALUES = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.FakeCuda:
    return fake_cuda.install(monkeypatch)


def filled(cuda: Cuda) -> CudaArray:
    array = cuda.zeros(VALUES.shape, np.float32)
    array[:] = VALUES
    return array


def test_an_array_is_zero_at_first_and_then_what_was_written(fake: fake_cuda.FakeCuda) -> None:
    array = Cuda().zeros((2, 3), np.int64)
    assert array.read().tolist() == [[0, 0, 0], [0, 0, 0]]
    array[:] = np.array([[1, 2, 3], [4, 5, 6]])
    assert array.read().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert array.read().dtype == np.int64


PARTS: list[Index] = [
    *(1, -1, slice(1, 2), slice(None), ()),
    *((-1, 2), (0, slice(1, 3)), (1, 0, slice(None)), (1, 2, 3, slice(0, 4)), (0, slice(2, 9)), (1, 2, 3, 4)),
    *((slice(0, 1), 0), (slice(None), slice(None), 2, slice(1, 3)), (slice(None), 1, slice(0, 3)), (slice(2, 1), 0)),
    *((slice(None), slice(1, 3), 0, 2), (0, slice(None), slice(1, 2), slice(4, 5))),
]


@pytest.mark.parametrize("index", PARTS)
def test_a_part_is_numpys_part(fake: fake_cuda.FakeCuda, index: Index) -> None:
    array, expected = filled(Cuda()), VALUES.copy()
    part = array[index]
    np.testing.assert_array_equal(part.read(), VALUES[index], strict=True)
    assert part.nbytes == VALUES[index].nbytes
    assert part.contiguous == VALUES[index].flags.c_contiguous or part.nbytes == 0
    array[index] = np.asarray(-VALUES[index])
    expected[index] *= -1
    np.testing.assert_array_equal(array.read(), expected)
    array[index] = 0
    expected[index] = 0
    np.testing.assert_array_equal(array.read(), expected)


@given(data=st.data())
def test_any_part_of_a_part(data: st.DataObject) -> None:
    """Views of views, filled from views of views on the host and on the device."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_cuda.install(monkeypatch)
        cuda = Cuda()
        shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
        values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        array, expected = cuda.zeros(shape, np.float32), np.zeros(shape, np.float32)
        source = cuda.zeros(shape, np.float32)
        source[()] = values
        index: tuple[slice, ...] = ()
        for length in shape:
            first = data.draw(st.integers(0, length))
            index += (slice(first, data.draw(st.integers(first, length))),)
        for origin in (source, values):
            array[()] = 0
            array[index] = origin[index]
            expected[:] = 0
            expected[index] = values[index]
            np.testing.assert_array_equal(array.read(), expected)


def test_what_is_no_part_is_refused(fake: fake_cuda.FakeCuda) -> None:
    array = filled(Cuda())
    wrong: list[Index] = [2, (0, 3), (0, 0, 0, 0, 0), slice(0, 2, 2)]
    for index in wrong:
        with pytest.raises(IndexError):
            array[index]


def test_layers_can_be_iterated(fake: fake_cuda.FakeCuda) -> None:
    np.testing.assert_array_equal([part.read() for part in filled(Cuda())], VALUES)


def test_copies_within_the_device_do_not_touch_the_host(fake: fake_cuda.FakeCuda) -> None:
    array = filled(Cuda())
    fake.events.clear()
    array[0, 0:1] = array[1, 2:3]
    assert [event[0] for event in fake.events] == ["DeviceToDevice", "synchronize"]
    np.testing.assert_array_equal(array.read()[0, 0], VALUES[1, 2])


def test_values_that_do_not_fit_are_refused(fake: fake_cuda.FakeCuda) -> None:
    array = Cuda().zeros((2, 3), np.float32)
    for values in (np.zeros((3, 2), np.float32), np.zeros((2, 3))):
        with pytest.raises(ProviderError, match=r"does not fit a device array float32 \[2, 3\]"):
            array[:] = values


def test_memory_is_freed_with_the_last_part(fake: fake_cuda.FakeCuda) -> None:
    cuda = Cuda()
    array = cuda.zeros((4, 4), np.float32)
    part = array[2]
    pinned = cuda.pinned(64)
    tail = pinned[32:]
    del array, pinned
    gc.collect()
    assert list(fake.device.values()) == [64]
    assert list(fake.pinned.values()) == [64]
    assert part.read().tolist() == [0, 0, 0, 0]
    tail[:] = 1
    del part, tail
    gc.collect()
    assert not fake.device
    assert not fake.pinned


def test_a_failure_says_what_failed_and_why(fake: fake_cuda.FakeCuda) -> None:
    with pytest.raises(ProviderError, match=r"cudaMalloc failed: out of memory \(CUDA error 2\)"):
        Cuda().zeros((1 << 20, 1 << 10), np.float32)


def test_without_the_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(ProviderError, match="pip install cuda-bindings"):
        Cuda()
