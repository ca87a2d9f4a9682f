"""A bundle is whole and its own, or it is refused by name."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.providers import find_provider
from dspark.providers.engine_key import EngineKey
from dspark.runtime import Bundle, BundleError, DSparkError, DSparkInference, ProviderError
from dspark.runtime.bundle.hashing import hash_file
from dspark.runtime.bundle.manifest import MANIFEST, SCHEMA_VERSION, FileInfo, PrecisionInfo
from dspark.runtime.loading.sessions import open_sessions

GoldenBundle = Callable[[str], Path]
NAMES = ["qwen3_target", "dspark_vanilla", "eagle3"]
VOCABULARY = "draft_vocabulary.npy"


@pytest.fixture
def copied(golden_bundle: GoldenBundle, tmp_path: Path) -> Path:
    return shutil.copytree(golden_bundle("dspark_vanilla"), tmp_path / "bundle")


def edit(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    change(manifest)
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)


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


# --- the manifest ---


@pytest.mark.parametrize("version", [0, 2, 3, "5", "next"])
def test_another_schema_version_is_told_with_both(version: object, copied: Path) -> None:
    edit(copied, lambda manifest: manifest.update(schema_version=version, anything="else"))
    with pytest.raises(BundleError, match=f"schema version {version}; this runtime reads version {SCHEMA_VERSION}"):
        Bundle.open(copied)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no version": (lambda m: m.pop("schema_version"), "schema_version: Field required"),
    "no target": (lambda m: m.pop("target"), "target: Field required"),
    "unknown key": (lambda m: m.update(beam_width=4), "beam_width: Extra inputs are not permitted"),
    "unknown inner key": (lambda m: m["target"].update(eos=1), r"target\.eos: Extra inputs are not permitted"),
    "wrong type": (lambda m: m["target"].update(vocabulary_size="many"), r"target\.vocabulary_size: Input should be"),
    "unknown drafter": (lambda m: m["drafter"].update(kind="medusa"), r"drafter\.kind: Input should be"),
    "unknown precision": (
        lambda m: m["precision"].update(target={"linear": "fp7", "tables": "fp32"}),
        r"precision\.target\.linear: Input should be",
    ),
    "unknown cache form": (lambda m: m.update(cache_form="paged"), "cache_form: Input should be"),
    "no layers": (lambda m: m["target"]["cache"].update(layers=0), r"target\.cache\.layers: Input should be"),
    "absolute path": (lambda m: m["graphs"].update(target="/etc/passwd"), r"'/etc/passwd' leaves the bundle's folder"),
    "parent path": (lambda m: m["graphs"].update(head="../head.onnx"), r"'\.\./head\.onnx' leaves the bundle's folder"),
    "inner parent path": (lambda m: m["graphs"].update(head="a/../../b"), "leaves the bundle's folder"),
    "backslash path": (lambda m: m["text"].update(tokenizer="..\\t.json"), "leaves the bundle's folder"),
    "listed path": (
        lambda m: m["files"].update({"../secret": {"bytes": 1, "sha256": ""}}),
        r"'\.\./secret' leaves the bundle's folder",
    ),
    "vocabulary path": (
        lambda m: m["drafter"].update(draft_vocabulary="/dev/stdin"),
        "'/dev/stdin' leaves the bundle's folder",
    ),
    "empty path": (lambda m: m["graphs"].update(target=""), "leaves the bundle's folder"),
    "unlisted graph": (lambda m: m["files"].pop("head.onnx"), r"graphs\.head names 'head\.onnx', which is not listed"),
    "unlisted tokenizer": (
        lambda m: m["text"].update(tokenizer="other.json"),
        r"text\.tokenizer names 'other\.json', which is not listed in files",
    ),
    "unlisted vocabulary": (
        lambda m: m["drafter"].update(draft_vocabulary=VOCABULARY),
        r"drafter\.draft_vocabulary names .* which is not listed",
    ),
    "no drafter graph": (
        lambda m: m["graphs"].update(drafter=None),
        "graphs has head, target; its models need drafter, head, target",
    ),
    "no drafter": (lambda m: m.update(drafter=None), "graphs has drafter, head, target; its models need target"),
    "no head": (lambda m: m.update(head=None), "head must be described"),
    "precision missing": (lambda m: m["precision"].pop("head"), "precision has drafter, target; its models need"),
    "precision too many": (
        lambda m: m["precision"].update(encoder={"linear": "fp32", "tables": "fp32"}),
        "precision has drafter, encoder, head, target; its models need",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_is_not_right_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, copied: Path
) -> None:
    edit(copied, lambda manifest: void(change(manifest)))
    with pytest.raises(BundleError, match=rf"manifest\.json: .*{message}"):
        Bundle.open(copied)


def void(_: object) -> None:
    """Takes what methods of dictionaries return."""


def sizes(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """Changes fields of the manifest, named ``target__cache__layers`` and so on."""

    def change(manifest: dict[str, Any]) -> None:
        for path, value in changes.items():
            *parents, name = path.split("__")
            place = manifest
            for parent in parents:
                place = place[parent]
            place[name] = value

    return change


CONTRADICTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "fewer layers": (
        "dspark_vanilla",
        sizes(target__cache__layers=7),
        "target.onnx: input past.7.key [B, 2, S, 16] is not given",
    ),
    "more layers": (
        "dspark_vanilla",
        sizes(target__cache__layers=9),
        "target.onnx: the graph has no input past.8.key",
    ),
    "heads": (
        "dspark_vanilla",
        sizes(target__cache__kv_heads=4),
        "target.onnx: input past.0.key has shape [B, 2, S, 16] in the graph and is called with [1, 4, 64, 16]",
    ),
    "vocabulary": (
        "qwen3_target",
        sizes(target__vocabulary_size=159),
        "target.onnx: output logits has shape [K, 160] in the graph and is called with [1, 159]",
    ),
    "rope lengths": (
        "qwen3_target",
        sizes(target__rope_lengths=True),
        "target.onnx: the graph has no input rope_lengths",
    ),
    "cache form": (
        "qwen3_target",
        sizes(cache_form="delta"),
        "target.onnx: the graph has no output new.0.key",
    ),
    "draft length": (
        "dspark_vanilla",
        sizes(drafter__draft_length=4),
        "drafter.onnx: output hidden has shape [B, 5, 64] in the graph and is called with [1, 4, 64]",
    ),
    "draft layers": (
        "dspark_vanilla",
        sizes(drafter__cache__head_dim=8),
        "target.onnx: input context.0.key has shape [B, 2, S, 16] in the graph and is called with [1, 2, 64, 8]",
    ),
    "top k": (
        "dspark_vanilla",
        sizes(drafter__top_k=3),
        "drafter.onnx: output base_logits has shape [B, 5, 160] in the graph and is called with [1, 5, 3]",
    ),
    "confidence": ("dflash", sizes(head__confidence="hidden"), "head.onnx: the graph has no output confidence"),
    "other graphs": (
        "dspark_vanilla",
        sizes(graphs__drafter="head.onnx", graphs__head="drafter.onnx"),
        "head.onnx: the graph has no input anchor_positions",
    ),
    "features": (
        "eagle3",
        sizes(drafter__hidden_size=32),
        "target.onnx: output feature has shape [N, 64] in the graph and is called with [1, 32]",
    ),
    "EAGLE-3's draft length": (
        "eagle3",
        sizes(drafter__draft_length=6),
        "drafter.onnx: input uniform has shape [B, 5] in the graph and is called with [1, 6]",
    ),
}


@pytest.mark.parametrize(("name", "change", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_manifest_that_describes_other_graphs_is_refused_when_it_is_loaded(
    name: str,
    change: Callable[[dict[str, Any]], object],
    message: str,
    golden_bundle: GoldenBundle,
    tmp_path: Path,
) -> None:
    path = shutil.copytree(golden_bundle(name), tmp_path / "bundle")
    edit(path, lambda manifest: void(change(manifest)))
    with pytest.raises(ProviderError) as raised:
        DSparkInference.load(path, threads=1)
    assert str(raised.value) == f"{path / message}; the bundle's manifest describes another graph"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"schema_version": 1}'])
def test_a_manifest_that_is_none_is_refused(content: bytes, copied: Path) -> None:
    (copied / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match=r"manifest\.json: "):
        Bundle.open(copied)


def test_a_file_is_no_bundle(copied: Path) -> None:
    with pytest.raises(BundleError, match=r"no bundle here \(manifest.json is missing\)"):
        Bundle.open(copied / "head.onnx")


@pytest.mark.parametrize(
    ("before", "twice"),
    [
        ('"cache_form":', '"cache_form": "delta", "cache_form":'),
        ('"vocabulary_size":', '"vocabulary_size": 7, "vocabulary_size":'),
        ('"schema_version":', '"schema_version": 3, "schema_version":'),
        ('"head.onnx": {', '"head.onnx": null, "head.onnx": {'),
    ],
)
def test_a_manifest_with_a_key_twice_is_refused(before: str, twice: str, copied: Path) -> None:
    file = copied / MANIFEST
    file.write_text(file.read_text().replace(before, twice, 1))
    key = before.split('"')[1]
    with pytest.raises(BundleError, match=re.escape(f"manifest.json: key {key!r} stands there twice")):
        Bundle.open(copied)


def test_what_stands_where_something_else_belongs_is_told(copied: Path) -> None:
    edit(copied, lambda manifest: manifest["target"].update(vocabulary_size=-7))
    with pytest.raises(BundleError) as raised:
        Bundle.open(copied)
    told = "target.vocabulary_size: Input should be greater than or equal to 1, not -7"
    assert str(raised.value) == f"{copied / MANIFEST}: {told}"


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_manifest_with_another_bit_is_read_or_refused(place: float, bit: int, copied: Path) -> None:
    file = copied / MANIFEST
    content = file.read_bytes()
    changed = bytearray(content)
    changed[int(place * len(content))] ^= 1 << bit
    file.write_bytes(changed)
    with suppress(BundleError):  # and no other
        Bundle.open(copied)
    file.write_bytes(content)


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


# --- what a provider can run ---


def test_a_precision_that_the_provider_does_not_run(golden_bundle: GoldenBundle) -> None:
    bundle = Bundle.open(golden_bundle("dspark_vanilla"))
    for precision in (PrecisionInfo(linear="bf16", tables="fp32"), PrecisionInfo(linear="fp32", tables="bf16")):
        other = bundle.manifest.model_copy(update={"precision": {**bundle.manifest.precision, "drafter": precision}})
        with pytest.raises(ProviderError, match=r"cpu does not run bf16 \(the drafter graph\); it runs .*fp32"):
            open_sessions(Bundle(bundle.path, other), find_provider("cpu"), ["target", "drafter", "head"], 1, None)


def test_errors_have_one_root() -> None:
    assert issubclass(BundleError, DSparkError)
