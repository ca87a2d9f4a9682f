"""What becomes of weights: checked against an unpacking that is written here."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dspark.exporter.errors import ExportError
from dspark.exporter.packings import BFLOAT16, FLOAT16, INT8, ROTATED_INT8, BlockPacking
from dspark.exporter.rotation import block_size, hadamard

ROWS = arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.sampled_from([2, 7, 32, 48, 96])),
    elements=st.floats(-(2.0**60), 2.0**60, width=32),
)


@given(ROWS)
def test_int8_is_within_half_a_step(rows: np.ndarray) -> None:
    whole, scales = INT8.pack(rows)
    assert (whole.dtype, whole.shape, scales.dtype, scales.shape) == (np.int8, rows.shape, np.float32, rows.shape[:1])
    assert np.abs(whole.astype(int)).max() <= 127
    error = np.abs(whole * scales[:, None].astype(np.float64) - rows)
    assert (error <= 0.5001 * scales[:, None].astype(np.float64) + 1e-37).all()


@given(ROWS)
def test_a_rotation_is_undone_by_itself(rows: np.ndarray) -> None:
    _, scales = ROTATED_INT8.pack(rows)
    room = 0.51 * block_size(rows.shape[1]) ** 0.5 * float(scales.max()) + 1e-37
    assert np.abs(_unpack_rotated(rows) - rows).max() <= room


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_hadamard_matrices_are_orthogonal_and_symmetric(size: int) -> None:
    matrix = hadamard(size)
    assert np.allclose(matrix @ matrix, np.eye(size), atol=1e-6)
    assert np.array_equal(matrix, matrix.T)
    assert len(np.unique(np.abs(matrix))) == 1


def test_a_rotation_keeps_an_outlier_from_drowning_the_others() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(8, 128)).astype(np.float32)
    rows[:, 17] = 300
    plain, rotated = (np.abs(unpacked - rows)[:, :17].mean() for unpacked in (_unpack(rows), _unpack_rotated(rows)))
    assert rotated < plain / 4


def _unpack(rows: np.ndarray) -> np.ndarray:
    whole, scales = INT8.pack(rows)
    unpacked: np.ndarray = whole * scales[:, None].astype(np.float64)
    return unpacked


def _unpack_rotated(rows: np.ndarray) -> np.ndarray:
    size = block_size(rows.shape[1])
    whole, scales = ROTATED_INT8.pack(rows)
    turned = (whole * scales[:, None].astype(np.float64)).reshape(-1, size)
    unpacked: np.ndarray = (turned @ hadamard(size)).reshape(rows.shape)
    return unpacked


@given(ROWS, st.sampled_from([16, 32]), st.sampled_from([4, 8]))
def test_blocks_are_within_a_step(rows: np.ndarray, block: int, bits: int) -> None:
    packed, scales = BlockPacking(bits, block).pack(rows)
    blocks = -(-rows.shape[1] // block)
    assert (packed.dtype, packed.shape, scales.shape) == (
        np.uint8,
        (len(rows), blocks, block * bits // 8),
        (len(rows), blocks),
    )
    whole = packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(rows), blocks, block)
    values = (whole.astype(np.float64) - 2 ** (bits - 1)) * scales[..., None]
    values = values.reshape(len(rows), -1)[:, : rows.shape[1]]
    room = np.repeat(np.abs(scales.astype(np.float64)), block, axis=1)[:, : rows.shape[1]]
    assert (np.abs(values - rows) <= 1.001 * room + 1e-37).all()
    largest = np.abs(rows).max()
    assert np.abs(values).max() == pytest.approx(largest, rel=1e-5, abs=1e-37)


@pytest.mark.parametrize("packing", [INT8, ROTATED_INT8, BlockPacking(4, 32), BlockPacking(8, 32), FLOAT16, BFLOAT16])
def test_rows_of_zeros_stay_zeros(packing: object) -> None:
    packed, *scales = packing.pack(np.zeros((2, 32), np.float32))  # type: ignore[attr-defined]
    assert all(np.isfinite(scale).all() for scale in scales)
    zero = {4: 0x88, 8: 0x80}[packing.bits] if isinstance(packing, BlockPacking) else 0
    assert (packed == zero).all()


def test_a_weight_beyond_float16_is_told() -> None:
    rows = np.array([[1.0, -7e4]], np.float32)
    with pytest.raises(ExportError, match="has a weight of 70000, which float16 cannot hold"):
        FLOAT16.pack(rows)
    assert np.isfinite(BFLOAT16.pack(rows)[0].astype(np.float32)).all()
