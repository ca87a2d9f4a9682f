"""Tokenizer, chat template and special tokens of a checkpoint folder."""

from pathlib import Path
from typing import Any

from dspark.exporter.checkpoints.description import TextAssets
from dspark.exporter.checkpoints.folder import read_json
from dspark.exporter.errors import CheckpointError

__all__ = ["read_text_assets"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")


def read_text_assets(folder: Path) -> TextAssets:
    """Reads what turns text into ids and back.

    Args:
        folder: A checkpoint. ``chat_template.jinja`` goes before the template in ``tokenizer_config.json``, and
            ``tokenizer_config.json`` before ``special_tokens_map.json``, as in transformers.

    Raises:
        CheckpointError: If a file is damaged, or the tokenizer is there only in another form than ``tokenizer.json``.
    """
    config = _read_if_there(folder / "tokenizer_config.json")
    special = _special_tokens(_read_if_there(folder / "special_tokens_map.json")) | _special_tokens(config)
    return TextAssets(_tokenizer(folder), _chat_template(folder, config), special)


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _tokenizer(folder: Path) -> str | None:
    path = folder / "tokenizer.json"
    if path.exists():
        read_json(path)
        return path.read_text(encoding="utf-8")
    slow = [name for name in SLOW_TOKENIZERS if (folder / name).is_file()]
    if slow:
        raise CheckpointError(f"{folder} has {slow[0]} but no tokenizer.json; save it again with transformers.")
    return None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    where = f"{folder / 'tokenizer_config.json'}: chat_template"
    try:
        named: dict[str, str] = {entry["name"]: entry["template"] for entry in template}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{where} is neither a text nor a list of named templates.") from error
    if "default" not in named:
        raise CheckpointError(f"{where} has {', '.join(named)}, but none named default.")
    return named["default"]


def _special_tokens(content: dict[str, Any]) -> dict[str, str]:
    """Special tokens, each a text or an object with its ``content``."""
    values = {name: content.get(name) for name in SPECIAL_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
