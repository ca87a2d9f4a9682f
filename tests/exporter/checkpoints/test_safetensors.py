"""Safetensors files, written by the library or by hand, whole and damaged."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark.exporter.checkpoints.safetensors import read_safetensors
from dspark.exporter.errors import CheckpointError

INDEX = "model.safetensors.index.json"
RANDOM = np.random.default_rng(0)


def write(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def shard(folder: Path, files: dict[str, dict[str, np.ndarray]], **places: str) -> None:
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    listed = {name: file for file, tensors in files.items() for name in tensors} | places
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))


def test_golden_tensors_are_the_librarys(golden: Path) -> None:
    file = golden / "qwen3_target" / "model.safetensors"
    tensors, files = read_safetensors(file.parent)
    expected = load_file(file)
    assert files == (file,)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == expected[name].shape
        np.testing.assert_array_equal(tensor.load(), expected[name])


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"])
def test_types(tmp_path: Path, dtype: str) -> None:
    values = RANDOM.integers(0, 2, (5, 3)).astype(dtype)
    save_file({"x": values, "scalar": np.array(values[0, 0])}, tmp_path / "model.safetensors")
    tensors, _ = read_safetensors(tmp_path)
    np.testing.assert_array_equal(tensors["x"].load(), values.astype(np.float32))
    native = tensors["x"].native_rows(1, 3)
    assert native.dtype == values.dtype
    np.testing.assert_array_equal(native, values[1:3])
    assert tensors["scalar"].shape == (1,)


@pytest.mark.parametrize(
    ("code", "dtype"),
    [("BF16", ml_dtypes.bfloat16), ("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2)],
)
def test_types_that_numpy_lacks(tmp_path: Path, code: str, dtype: type) -> None:
    values = RANDOM.standard_normal((4, 6)).astype(dtype)
    entry = {"dtype": code, "shape": [4, 6], "data_offsets": [0, values.nbytes]}
    write(tmp_path / "model.safetensors", {"x": entry}, values.tobytes())
    tensors, _ = read_safetensors(tmp_path)
    np.testing.assert_array_equal(tensors["x"].rows(1, 4), values[1:4].astype(np.float32))


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    bits = RANDOM.integers(0, 1 << 15, 64, dtype=np.uint16)
    bits[(bits >> 7) == 0xFF] = 0  # no NaN
    entry = {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]}
    write(tmp_path / "model.safetensors", {"x": entry}, bits.tobytes())
    tensors, _ = read_safetensors(tmp_path)
    np.testing.assert_array_equal(tensors["x"].load(), (bits.astype(np.uint32) << 16).view(np.float32))


def test_shards(tmp_path: Path) -> None:
    tensors = {f"t{index}": RANDOM.standard_normal((index + 1, 4)).astype(np.float32) for index in range(5)}
    names = ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"]
    split = {
        names[0]: {"t0": tensors["t0"], "t3": tensors["t3"]},
        names[1]: {key: tensors[key] for key in ("t1", "t2", "t4")},
    }
    shard(tmp_path, split)
    read, files = read_safetensors(tmp_path)
    assert files == (tmp_path / names[1], tmp_path / names[0])
    assert read.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(read[name].load(), values)


def test_a_leftover_beside_an_index_is_named(tmp_path: Path) -> None:
    shard(tmp_path, {"model-1.safetensors": {"a": np.zeros(2)}, "model-2.safetensors": {"b": np.zeros(2)}})
    save_file({"a": np.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"has model\.safetensors with 1 tensors and .*index\.json.* hold 2; remove"
    ):
        read_safetensors(tmp_path)


def test_a_single_file_beside_an_index_that_agrees_or_is_of_no_use_is_read(tmp_path: Path) -> None:
    shard(tmp_path, {"model-1.safetensors": {"a": np.zeros(2)}, "model-2.safetensors": {"b": np.zeros(2)}})
    save_file({"a": np.ones(2), "b": np.ones(2)}, tmp_path / "model.safetensors")
    tensors, files = read_safetensors(tmp_path)
    assert files == (tmp_path / "model.safetensors",)
    np.testing.assert_array_equal(tensors["a"].load(), np.ones(2))
    (tmp_path / "model-2.safetensors").unlink()
    save_file({"a": np.ones(2)}, tmp_path / "model.safetensors")
    assert read_safetensors(tmp_path)[0].keys() == {"a"}


def test_nothing_but_headers_is_read(tmp_path: Path) -> None:
    """A sparse file of 64 GB is opened at once, and rows are read where they lie."""
    rows, width = 1 << 20, 1 << 14
    entry = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, 4 * rows * width]}
    path = tmp_path / "model.safetensors"
    write(path, {"big": entry}, b"")
    start = path.stat().st_size
    try:
        os.truncate(path, start + 4 * rows * width)
    except OSError:
        pytest.skip("no sparse files here")
    with path.open("r+b") as file:
        file.seek(start + 4 * width * 777_777)
        file.write(np.float32(1.5).tobytes())
    tensors, _ = read_safetensors(tmp_path)
    assert tensors["big"].rows(777_777, 777_778)[0, 0] == 1.5
    assert not tensors["big"].rows(0, 1).any()


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": ENTRY}, b"\0" * 15, "truncated: .* bytes, but its header describes"),
        ({"x": ENTRY}, b"\0" * 17, "is damaged: .* bytes, but"),
        ({"x": ENTRY | {"shape": [2, 3]}}, b"\0" * 16, r"x is F32 \[2, 3\], which bytes 0 to 16 cannot hold"),
        ({"x": ENTRY | {"data_offsets": [0, -16]}}, b"\0" * 16, "x is F32"),
        ({"x": ENTRY | {"shape": [2.0, 2]}}, b"\0" * 16, "x is F32"),
        ({"x": ENTRY | {"dtype": "F4"}}, b"\0" * 16, "x has the type 'F4'; supported are F64, F32"),
        ({"x": {"dtype": "F32"}}, b"\0" * 16, "x lacks dtype, shape or data_offsets"),
        ({"x": "F32"}, b"\0" * 16, "x lacks"),
        ({"x": ENTRY, "y": ENTRY | {"data_offsets": [8, 24]}}, b"\0" * 24, "y begins at byte 8"),
        ({"x": ENTRY | {"data_offsets": [8, 24]}}, b"\0" * 24, "x begins at byte 8"),
        ([], b"", "not a JSON object"),
        (b"{nonsense", b"", "not JSON"),
    ],
)
def test_damaged_files(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as error:
        read_safetensors(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, struct.pack("<Q", 1 << 40) + b"{}", b"version https://git-lfs"])
def test_files_that_are_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or no safetensors file"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 20, 100, 400, 10_000])
def test_cut_anywhere(golden: Path, tmp_path: Path, length: int) -> None:
    whole = (golden / "dflash" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:length])
    with pytest.raises(CheckpointError, match="truncated"):
        read_safetensors(tmp_path)


def spoil_index(content: Any) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(content)) and None
    )


ONE = {"x": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: shard(folder, {"a.safetensors": ONE}, y="b.safetensors"), "lacks b.safetensors"),
        (lambda folder: shard(folder, {"a.safetensors": ONE}, y="a.safetensors"), "a.safetensors lacks the tensor y"),
        (
            lambda folder: shard(folder, {"a.safetensors": ONE | {"z": ONE["x"]}, "b.safetensors": ONE}),
            "repeats the tensor x",
        ),
        (
            lambda folder: shard(folder, {"a.safetensors": ONE}, y="../a.safetensors"),
            r"places y in '\.\./a.safetensors'",
        ),
        (lambda folder: shard(folder, {"a.safetensors": ONE}, y="/etc/passwd"), "places y in '/etc/passwd'"),
        (lambda folder: shard(folder, {"a.safetensors": ONE}, y=".."), r"places y in '\.\.'"),
        (lambda folder: shard(folder, {"a.safetensors": ONE}, y=""), "places y in ''"),
        (lambda folder: shard(folder, {"a.safetensors": ONE}, y="pytorch_model.bin"), "not a .safetensors file"),
        (spoil_index("{"), "index.json is damaged"),
        (spoil_index({"weight_map": 3}), "index.json is damaged"),
        (spoil_index({"weight_map": {"x": 3}}), "places x in 3"),
        (spoil_index({}), "index.json is damaged"),
        (spoil_index([]), "index.json is damaged"),
        (lambda folder: None, "has neither model.safetensors nor model.safetensors.index.json"),
        (lambda folder: (folder / "pytorch_model.bin").touch(), "pytorch_model.bin is a pickle"),
        (lambda folder: (folder / "drafter.pt").touch(), "drafter.pt is a pickle"),
    ],
)
def test_damaged_folders(tmp_path: Path, prepare: Callable[[Path], Any], message: str) -> None:
    prepare(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_safetensors(tmp_path)


def test_an_empty_index_has_no_tensors(tmp_path: Path) -> None:
    spoil_index({"weight_map": {}})(tmp_path)
    assert read_safetensors(tmp_path) == ({}, ())
