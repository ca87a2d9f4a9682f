"""Tokenizer, chat template and special tokens of a checkpoint folder."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dspark.exporter.checkpoints.added_tokens import merge_added_tokens
from dspark.exporter.checkpoints.description import TextAssets
from dspark.exporter.checkpoints.files import has_file, read_json, read_text
from dspark.exporter.errors import CheckpointError

__all__ = ["read_text_assets"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FURTHER_SPECIAL_TOKENS = ("additional_special_tokens", "extra_special_tokens")
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")
OTHER_TOKENIZERS = ("tekken.json",)


def read_text_assets(folder: Path) -> TextAssets:
    """Reads what turns text into ids and back.

    Args:
        folder: A checkpoint. ``chat_template.jinja`` overrides the template in ``tokenizer_config.json``, and
            ``tokenizer_config.json`` before ``special_tokens_map.json``, as in transformers.

    Raises:
        CheckpointError: If a file is damaged, or the tokenizer is there only in another form than ``tokenizer.json``.
    """
    config = _read_if_there(folder / "tokenizer_config.json")
    older = _read_if_there(folder / "special_tokens_map.json")
    special, template = _special_tokens(older) | _special_tokens(config), _chat_template(folder, config)
    if not has_file(folder / "tokenizer.json"):
        return TextAssets(None, template, special, notes=(_missing(folder),))
    read_json(folder / "tokenizer.json")
    text = read_text(folder / "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing more specific
        raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read: {error}.") from error
    every = dict.fromkeys([*special.values(), *_further_special_tokens(older), *_further_special_tokens(config)])
    notes = merge_added_tokens(tokenizer, folder, config, every)
    end = tokenizer.token_to_id(special.get("eos_token", ""))
    return TextAssets(
        tokenizer.to_str(pretty=False) if notes else text,
        template,
        special,
        vocabulary=tokenizer.get_vocab(),
        ends={} if end is None else {end: f"{special['eos_token']!r}, the tokenizer's eos_token"},
        notes=notes,
    )


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if has_file(path) else {}


def _missing(folder: Path) -> str:
    """What to say of a folder without tokenizer; one in another form is refused."""
    slow = [name for name in SLOW_TOKENIZERS if has_file(folder / name)]
    if slow:
        raise CheckpointError(f"{folder} has {slow[0]} but no tokenizer.json; save it again with transformers.")
    other = [f" ({name} is not read)" for name in OTHER_TOKENIZERS if has_file(folder / name)]
    return f"{folder} has no tokenizer.json{''.join(other)}: the bundle takes token ids, no text"


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if has_file(path):
        return read_text(path)
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


def _further_special_tokens(content: dict[str, Any]) -> list[str]:
    """Special tokens without a name of their own, as in ``_special_tokens``."""
    lists = [content.get(key) for key in FURTHER_SPECIAL_TOKENS]
    listed = [value for values in lists if isinstance(values, list) for value in values]
    texts = [value.get("content") if isinstance(value, dict) else value for value in listed]
    return [text for text in texts if isinstance(text, str)]
