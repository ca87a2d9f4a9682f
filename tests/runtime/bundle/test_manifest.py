"""A manifest is right, or it is refused with what is wrong."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.runtime import Bundle, BundleError
from dspark.runtime.bundle.manifest import MANIFEST, SCHEMA_VERSION
from tests.support.bundle_editing import VOCABULARY, edit, void

GoldenBundle = Callable[[str], Path]


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


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"schema_version": 1}'])
def test_a_manifest_that_is_none_is_refused(content: bytes, copied: Path) -> None:
    (copied / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match=r"manifest\.json: "):
        Bundle.open(copied)


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
