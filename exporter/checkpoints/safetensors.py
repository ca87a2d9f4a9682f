"""Safetensors files: the header is read, the tensors stay on disk.

The layout is public (huggingface/safetensors, README): eight bytes with the header's length, a JSON header with each
tensor's type, shape and byte range, then the tensors without gaps. It is read here because the library hands out
neither offsets, which reading without mapping needs, nor which file is at fault.
"""

import json
import math
import struct
from collections.abc import Set
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark.exporter.checkpoints.files import has_file
from dspark.exporter.checkpoints.tensors import FileTensor
from dspark.exporter.errors import CheckpointError

__all__ = ["has_weights", "read_safetensors"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def read_safetensors(folder: Path) -> tuple[dict[str, FileTensor], tuple[Path, ...]]:
    """Reads the headers of a folder's weights, one file or sharded.

    Args:
        folder: Holds ``model.safetensors``, or ``model.safetensors.index.json`` and the shards it names.

    Returns:
        The tensors by name, and the files they are in.

    Raises:
        CheckpointError: If a file is missing, truncated or damaged, lies outside the folder, is a pickle or a Git LFS
            pointer, or one file and an index stand side by side and hold different tensors.
    """
    placement = _find_weight_files(folder)
    tensors: dict[str, FileTensor] = {}
    for file, listed in placement.items():
        header = _read_file(file)
        lost = sorted(listed - header.keys())
        if lost:
            raise CheckpointError(f"{file} lacks the tensor {lost[0]}, which {INDEX_FILE} says it holds.")
        twice = sorted(tensors.keys() & header.keys())
        if twice:
            raise CheckpointError(f"{file} repeats the tensor {twice[0]} of another file.")
        tensors |= header
    if folder / SINGLE_FILE in placement and has_file(folder / INDEX_FILE):
        _refuse_leftover(folder, tensors.keys())
    return tensors, tuple(placement)


def has_weights(folder: Path) -> bool:
    """Whether a folder has safetensors of a whole model.

    Raises:
        CheckpointError: If something else stands in their place.
    """
    return has_file(folder / SINGLE_FILE) or has_file(folder / INDEX_FILE)


def _find_weight_files(folder: Path) -> dict[Path, set[str]]:
    """The weight files, and for each the tensors that the index says it holds (none for a single file)."""
    if has_file(folder / SINGLE_FILE):
        return {folder / SINGLE_FILE: set()}
    if has_file(folder / INDEX_FILE):
        files = _read_index(folder)
        missing = sorted(file.name for file in files if not has_file(file))
        if missing:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which {INDEX_FILE} names.")
        return files
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]} is a pickle, which can run code when it is read; convert it to {SINGLE_FILE}."
        )
    raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}.")


def _read_index(folder: Path) -> dict[Path, set[str]]:
    index = folder / INDEX_FILE
    try:
        places = json.loads(index.read_bytes())["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: a JSON object with a weight_map is needed.") from error
    files: dict[Path, set[str]] = {}
    for tensor, name in places:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{index} places {tensor} in {name!r}; a file name without a folder is needed.")
        if Path(name).suffix != ".safetensors":
            raise CheckpointError(f"{index} places {tensor} in {name!r}, which is not a .safetensors file.")
        files.setdefault(folder / name, set()).add(tensor)
    return dict(sorted(files.items()))


def _refuse_leftover(folder: Path, names: Set[str]) -> None:
    """Refuses a single file beside whole shards of other tensors: one of the two is left over."""
    shards = _read_index(folder)
    listed = set().union(*shards.values())
    if folder / SINGLE_FILE not in shards and names != listed and all(file.is_file() for file in shards):
        raise CheckpointError(
            f"{folder} has {SINGLE_FILE} with {len(names)} tensors and {INDEX_FILE}, whose files hold {len(listed)}; "
            "remove the one that is left over."
        )


def _read_file(path: Path) -> dict[str, FileTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is truncated or no safetensors file ({size} bytes, header of {length}).")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: its header is not JSON.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its header is not a JSON object.")
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    position = 0
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != position:
            raise CheckpointError(
                f"{path} is damaged: {name} begins at byte {begin} of the data; {position} is needed."
            )
        position = end
    start = 8 + length
    if start + position != size:
        kind = "truncated" if start + position > size else "damaged"
        raise CheckpointError(f"{path} is {kind}: {size} bytes, but its header describes {start + position}.")
    return {
        name: FileTensor(f"{path.name}:{name}", path, start + begin, shape, dtype)
        for name, (dtype, shape, begin, _) in entries.items()
    }


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {name} lacks dtype, shape or data_offsets.") from error
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} has the type {dtype!r}; supported are {', '.join(DTYPES)}.")
    if not whole or end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(
            f"{path} is damaged: {name} is {dtype} {list(shape)}, which bytes {begin} to {end} cannot hold."
        )
    return DTYPES[dtype], shape, begin, end
