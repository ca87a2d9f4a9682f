"""Versioned files: read whole, or refused with the file's name."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from dspark.runtime import BundleError
from dspark.runtime.bundle.versioned_file import read_versioned


class Content(BaseModel):
    model_config = ConfigDict(extra="forbid")

    schema_version: int
    size: int
    inner: dict[str, int] = {}


def test_what_is_there_is_read(tmp_path: Path) -> None:
    file = tmp_path / "content.json"
    file.write_text('{"schema_version": 2, "size": 7}')
    assert read_versioned(file, Content, 2) == Content(schema_version=2, size=7)


def test_no_file_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_versioned(tmp_path / "none.json", Content, 2) is None
    assert read_versioned(tmp_path / "file" / "none.json", Content, 2) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema_version": 3, "length": 7}', "schema version 3; this runtime reads version 2"),
        ('{"schema_version": "next", "size": 7}', "schema version next; this runtime reads version 2"),
        ('{"size": 7}', "schema_version: Field required"),
        ('{"schema_version": 2, "size": "many"}', "size: Input should be a valid integer"),
        ('{"schema_version": 2, "size": 7, "inner": {"a": 1, "a": 2}}', "key 'a' stands there twice"),
        ("[]", "the file: Input should be an object"),
        ('{"schema_version": 2,', "the file: Invalid JSON"),
    ],
)
def test_other_content_is_refused_with_file_and_advice(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "content.json"
    file.write_text(content)
    with pytest.raises(BundleError) as raised:
        read_versioned(file, Content, 2, advice="; make it anew")
    assert str(raised.value).startswith(f"{file}: {message}")
    assert str(raised.value).endswith("; make it anew")


def test_what_cannot_be_read_is_no_missing_file(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(BundleError, match=r"folder\.json: cannot be read: "):
        read_versioned(tmp_path / "folder.json", Content, 2)
