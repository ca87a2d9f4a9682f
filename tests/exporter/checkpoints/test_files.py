"""What may stand in the place of a checkpoint's file: pointers, folders, dangling links, adapters, byte-order marks."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.exporter.checkpoints import read_drafter, read_target
from dspark.exporter.checkpoints.description import Target
from dspark.exporter.errors import CheckpointError
from tests.checkpoints import write_target
from tests.exporter.checkpoints.editing import GOLDEN, Checkpoint

Copy = Callable[[str], Checkpoint]

POINTER = """\
version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""
FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja"])
def test_a_pointer_is_called_one(name: str, copy: Copy) -> None:
    folder = copy("llama_target").folder
    (folder / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is a Git LFS pointer.*run `git lfs pull`"):
        read_target(folder)


def test_a_pointer_among_shards_is_called_one(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", shards=2)
    (folder / "model-00002-of-00002.safetensors").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is a Git LFS pointer"):
        read_target(folder)


@pytest.mark.parametrize("name", ["model.gguf", "model.GGUF", "sha256-4d7a2146"])
def test_a_pointer_instead_of_a_gguf_file_is_called_one(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is a Git LFS pointer"):
        read_target(tmp_path / name)


def test_a_drafters_pointer_is_called_one(copy: Copy, target: Target) -> None:
    folder = copy("dflash").folder
    (folder / "model.safetensors").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a Git LFS pointer"):
        read_drafter(folder, target)


@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json", "added_tokens.json", "tokenizer.model"])
@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_what_is_no_file_does_not_count_as_absent(kind: str, name: str, copy: Copy) -> None:
    folder = copy("llama_target").folder
    for file in {"model.safetensors": [], "tokenizer.model": ["tokenizer.json"]}.get(name, []):
        (folder / file).unlink()
    (folder / name).unlink(missing_ok=True)
    if kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("blobs/nothing")
    reason = {"folder": "it is a directory", "dangling link": "it is a link to blobs/nothing, which is not there"}
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} cannot be read: {reason[kind]}"):
        read_target(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_byte_order_mark_is_no_content(name: str, copy: Copy) -> None:
    folder = copy("llama_target").folder
    if name.endswith(".json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (GOLDEN / "llama_target" / name).read_bytes())
    target, expected = read_target(folder), read_target(GOLDEN / "llama_target")
    assert (target.backbone, target.text, target.stop_token_ids) == (
        expected.backbone,
        expected.text,
        expected.stop_token_ids,
    )
    assert target.text.tokenizer == expected.text.tokenizer


def write_adapter(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.2-1B", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    shutil.copyfile(GOLDEN / "llama_target" / "model.safetensors", folder / "adapter_model.safetensors")


def test_an_adapter_is_called_one_and_its_base_named(tmp_path: Path, target: Target) -> None:
    write_adapter(tmp_path / "adapter")
    message = r"adapter holds a LORA adapter.*merge it into its base, meta-llama/Llama-3\.2-1B.*export the result"
    with pytest.raises(CheckpointError, match=message):
        read_target(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=message):
        read_drafter(tmp_path / "adapter", target)


def test_an_adapter_without_a_named_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"its base, which its adapter_config\.json does not name"):
        read_target(tmp_path)


def test_an_adapter_beside_a_whole_model_is_not_applied(copy: Copy, target: Target) -> None:
    for name in ("llama_target", "dflash"):
        folder = copy(name).folder
        write_adapter(folder)
        described = read_target(folder) if name == "llama_target" else read_drafter(folder, target)
        assert any("adapter_config.json is not applied" in note for note in described.notes)
