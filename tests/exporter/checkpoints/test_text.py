"""Tokenizer, chat template and special tokens."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dspark.exporter.checkpoints.text import read_text_assets
from dspark.exporter.errors import CheckpointError


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def test_nothing_there(tmp_path: Path) -> None:
    text = read_text_assets(tmp_path)
    assert (text.tokenizer, text.chat_template, text.special_tokens) == (None, None, {})


def test_tokenizer_is_taken_word_for_word(tmp_path: Path) -> None:
    content = '{"version": "1.0",  "model": {"type": "WordLevel", "vocab": {"ä": 0}, "unk_token": "ä"}}\n'
    assert read_text_assets(write(tmp_path, tokenizer_json=content)).tokenizer == content


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config_json": {"chat_template": "{{ a }}"}}, "{{ a }}"),
        (
            {
                "tokenizer_config_json": {
                    "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
                }
            },
            "d",
        ),
        ({"tokenizer_config_json": {"chat_template": "old"}, "chat_template_jinja": "{{ new }}\n"}, "{{ new }}\n"),
        ({"tokenizer_config_json": {"chat_template": None}}, None),
    ],
)
def test_chat_template(tmp_path: Path, files: dict[str, Any], template: str | None) -> None:
    assert read_text_assets(write(tmp_path, **files)).chat_template == template


def test_special_tokens(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "add_bos_token": True,
        "pad_token": None,
    }
    older = {"eos_token": "<old>", "unk_token": {"content": "<unk>"}, "additional_special_tokens": ["<x>"]}
    text = read_text_assets(write(tmp_path, tokenizer_config_json=config, special_tokens_map_json=older))
    assert text.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_json": "{"}, "tokenizer.json is not JSON"),
        ({"tokenizer_json": "[]"}, "tokenizer.json holds a list"),
        ({"tokenizer_model": "binary"}, "tokenizer.model but no tokenizer.json"),
        ({"vocab_json": {}}, "vocab.json but no tokenizer.json"),
        (
            {"tokenizer_config_json": {"chat_template": [{"name": "rag", "template": "r"}]}},
            "has rag, but none named default",
        ),
        ({"tokenizer_config_json": {"chat_template": 3}}, "neither a text nor a list"),
        ({"tokenizer_config_json": {"chat_template": [{"name": "default"}]}}, "neither a text nor a list"),
    ],
)
def test_refusals(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_text_assets(write(tmp_path, **files))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
)
def test_a_folder_in_the_place_of_a_file_is_not_taken_for_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} cannot be read: .*[Ii]s a directory"):
        read_text_assets(tmp_path)


def test_a_template_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read: 'utf-8' codec"):
        read_text_assets(tmp_path)
