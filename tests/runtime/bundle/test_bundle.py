"""A bundle is whole and its own, or it is refused by name."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.providers.engine_key import EngineKey
from dspark.runtime import Bundle, BundleError, DSparkInference, ProviderError
from dspark.runtime.bundle.hashing import hash_file
from dspark.runtime.bundle.manifest import MANIFEST, SCHEMA_VERSION, FileInfo
from tests.support.bundle_editing import VOCABULARY, edit, flip

GoldenBundle = Callable[[str], Path]
NAMES = ["qwen3_target", "dspark_vanilla", "eagle3"]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_exporter_writes_is_read(name: str, golden_bundle: GoldenBundle) -> None:
    path = golden_bundle(name)
    for given_path in (path, str(path)):
        bundle = Bundle.open(given_path, check_hashes=True)
        assert bundle.path == path
        assert {*bundle.manifest.files, MANIFEST} == {file.name for file in path.iterdir() if file.is_file()}
        assert bundle.manifest.schema_version == SCHEMA_VERSION
        assert bundle.draft_vocabulary() is None


def test_a_bundle_can_be_moved(golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    first = DSparkInference.load(golden_bundle("eagle3"), threads=1).generate(["tead "])[0].token_ids
    moved = shutil.copytree(golden_bundle("eagle3"), tmp_path / "else where" / "ü")
    assert DSparkInference.load(moved, threads=1).generate(["tead "])[0].token_ids == first


# --- graphs that were compiled: what they were compiled from may be gone ---


@pytest.fixture
def compiled(copied: Path) -> Path:
    """With the keys of compiled graphs."""
    manifest = Bundle.open(copied).manifest
    folder = copied / "engines" / "device"
    folder.mkdir(parents=True)
    for graph in ("target", "drafter", "head"):
        EngineKey("", "", "", manifest.files[f"{graph}.onnx"].sha256, "fp32", None, {}).write(folder / f"{graph}.json")
    return copied


def test_graphs_and_weights_may_be_gone_but_nothing_else(compiled: Path) -> None:
    for name in ("target.onnx", "drafter.onnx", "head.onnx", "weights.bin"):
        (compiled / name).unlink()
        Bundle.open(compiled, check_hashes=True)
    (compiled / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"tokenizer\.json: missing"):
        Bundle.open(compiled)


def test_what_is_there_must_still_be_whole(compiled: Path) -> None:
    flip(compiled / "weights.bin", 100)
    with pytest.raises(BundleError, match=r"weights\.bin: altered since export"):
        Bundle.open(compiled)


@pytest.mark.parametrize(("field", "there"), [("graph", "0" * 64), ("precision", "fp16")])
def test_a_compiled_graph_of_another_bundle_is_refused_with_both_values(field: str, there: str, compiled: Path) -> None:
    key = compiled / "engines" / "device" / "drafter.json"
    values = json.loads(key.read_text())
    key.write_text(json.dumps({**values, field: there}))
    (compiled / "drafter.onnx").unlink()
    expected = rf"drafter\.json: built for {field} '{there}', but here it is '{values[field]}'; take it away, or export"
    with pytest.raises(ProviderError, match=expected):
        Bundle.open(compiled)


# --- files ---


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(
            BundleError, match=r"no bundle here \(manifest.json is missing\); make one with dspark-export"
        ):
            Bundle.open(path)


@pytest.mark.parametrize("name", ["target.onnx", "drafter.onnx", "head.onnx", "weights.bin", "tokenizer.json"])
def test_a_missing_short_or_long_file_is_named(name: str, copied: Path) -> None:
    """Whether or not hashes are checked."""
    file = copied / name
    size, content = file.stat().st_size, file.read_bytes()
    for check_hashes in (None, True, False):
        file.write_bytes(content[:-1])
        with pytest.raises(BundleError, match=rf"{name}: has {size - 1} bytes, expected {size}"):
            Bundle.open(copied, check_hashes=check_hashes)
        file.write_bytes(content + b"\0")
        with pytest.raises(BundleError, match=rf"{name}: has {size + 1} bytes, expected {size}"):
            DSparkInference.load(copied, check_hashes=check_hashes)
        file.unlink()
        with pytest.raises(BundleError, match=rf"{name}: missing; the manifest lists it with {size} bytes"):
            Bundle.open(copied, check_hashes=check_hashes)
        file.write_bytes(content)
        Bundle.open(copied, check_hashes=check_hashes)


@pytest.mark.parametrize("place", [0.0, 0.37, 1.0])
def test_one_other_bit_in_any_file_is_found(place: float, copied: Path) -> None:
    for name, info in Bundle.open(copied).manifest.files.items():
        file = copied / name
        position = int(place * (info.bytes - 1))
        flip(file, position)
        for check_hashes in (None, True):
            with pytest.raises(BundleError, match=f"{name}: altered since export .SHA-256 .* expected {info.sha256}"):
                Bundle.open(copied, check_hashes=check_hashes)
            with pytest.raises(BundleError, match=f"{name}: altered since export"):
                DSparkInference.load(copied, threads=1, check_hashes=check_hashes)
        Bundle.open(copied, check_hashes=False)
        flip(file, position)
    Bundle.open(copied)


def test_hashes_of_large_bundles_are_checked_on_request(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(copied / "weights.bin", 1000)
    monkeypatch.setattr("dspark.runtime.bundle.bundle.HASHED_ALWAYS", 10_000)
    Bundle.open(copied)
    with pytest.raises(BundleError, match=r"weights\.bin: altered"):
        Bundle.open(copied, check_hashes=True)


def test_a_damaged_graph_is_named_even_without_hashes(copied: Path) -> None:
    file = copied / "target.onnx"
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(ProviderError, match=r"target\.onnx: CPUExecutionProvider cannot load the graph"):
        DSparkInference.load(copied, check_hashes=False)


def test_a_link_to_a_folder_is_no_file(copied: Path) -> None:
    (copied / "head.onnx").unlink()
    (copied / "head.onnx").mkdir()
    with pytest.raises(BundleError, match=r"head\.onnx: missing"):
        Bundle.open(copied)


def test_a_file_is_no_bundle(copied: Path) -> None:
    with pytest.raises(BundleError, match=r"no bundle here \(manifest.json is missing\)"):
        Bundle.open(copied / "head.onnx")


# --- the draft vocabulary ---


def with_vocabulary(bundle: Path, content: bytes) -> Bundle:
    """Gives a bundle a draft vocabulary file that its manifest vouches for."""
    (bundle / VOCABULARY).write_bytes(content)
    info = FileInfo(bytes=len(content), sha256=hash_file(bundle / VOCABULARY)).model_dump()

    def name(manifest: dict[str, Any]) -> None:
        manifest["files"][VOCABULARY] = info
        manifest["drafter"]["draft_vocabulary"] = VOCABULARY

    edit(bundle, name)
    return Bundle.open(bundle)


def saved(array: np.ndarray, tmp_path: Path) -> bytes:
    file = tmp_path / "saved.npy"
    np.save(file, array, allow_pickle=True)
    return file.read_bytes()


def test_a_draft_vocabulary_is_read(copied: Path, tmp_path: Path) -> None:
    ids = np.arange(160)[::-1].copy()
    found = with_vocabulary(copied, saved(ids, tmp_path)).draft_vocabulary()
    assert found is not None
    assert found.dtype == np.int64
    assert found.tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.arange(159), r"holds int64 \[159\], expected int64 \[160\]"),
        (np.arange(160, dtype=np.int32), r"holds int32 \[160\], expected int64 \[160\]"),
        (np.arange(160).reshape(2, 80), r"holds int64 \[2, 80\]"),
        (np.arange(160) - 1, "ids outside the target's vocabulary"),
        (np.arange(160) + 1, "ids outside the target's vocabulary"),
    ],
)
def test_a_draft_vocabulary_that_does_not_fit(array: np.ndarray, message: str, copied: Path, tmp_path: Path) -> None:
    bundle = with_vocabulary(copied, saved(array, tmp_path))
    with pytest.raises(BundleError, match=rf"draft_vocabulary\.npy: .*{message}"):
        bundle.draft_vocabulary()
    with pytest.raises(BundleError, match=r"draft_vocabulary\.npy: "):
        DSparkInference.load(copied, threads=1)


class Trap:
    """Sets a mark when it is unpickled."""

    sprung = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return spring, ()


def spring() -> None:
    Trap.sprung = True


def test_nothing_is_unpickled(copied: Path, tmp_path: Path) -> None:
    objects = np.empty(160, object)
    objects[:] = [Trap()] * 160
    archive = tmp_path / "archive.npz"
    np.savez(archive, np.arange(160))
    contents = [
        saved(objects, tmp_path),
        pickle.dumps(Trap()),
        archive.read_bytes(),
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\1\0",
    ]
    for content in contents:
        bundle = with_vocabulary(copied, content)
        with pytest.raises(BundleError, match=r"draft_vocabulary\.npy: not an array file"):
            bundle.draft_vocabulary()
    assert not Trap.sprung
    pickle.loads(pickle.dumps(Trap()))
    assert Trap.sprung  # the trap works
