"""Tokens that stand beside ``tokenizer.json`` and not in it, merged into it as transformers does."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from dspark.exporter.checkpoints.files import has_file, read_json
from dspark.exporter.errors import CheckpointError

__all__ = ["merge_added_tokens"]

LEGACY_FILE = "added_tokens.json"
CONFIG_FILE = "tokenizer_config.json"
DECODER = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
SHOWN = 3


def merge_added_tokens(
    tokenizer: Tokenizer, folder: Path, config: Mapping[str, Any], special: Collection[str]
) -> tuple[str, ...]:
    """Adds what other files of a checkpoint add to the vocabulary.

    ``added_tokens_decoder`` of ``tokenizer_config.json`` overrides ``added_tokens.json``, which older versions of
    transformers wrote. Special tokens that the vocabulary has, but not as tokens that are found before a text is split,
    become such. Names of special tokens alone give no new ids.

    Args:
        tokenizer: Read from ``tokenizer.json``; changed in place.
        folder: The checkpoint.
        config: Content of ``tokenizer_config.json``.
        special: Texts of the special tokens.

    Returns:
        Notes on what was added; empty if ``tokenizer.json`` has everything.

    Raises:
        CheckpointError: If a file is damaged or contradicts ``tokenizer.json``.
    """
    present = tokenizer.get_added_tokens_decoder()
    source, listed = _listed(folder, config, special, present)
    fresh = {id_: token for id_, token in sorted(listed.items()) if repr(present.get(id_)) != repr(token)}
    tokenizer.add_tokens(list(fresh.values()))
    for id_, token in fresh.items():
        given = tokenizer.token_to_id(token.content)
        if given != id_:
            raise CheckpointError(
                f"{source} gives {token.content!r} the id {id_}, but in {folder / 'tokenizer.json'} it has {given}; "
                "save the tokenizer again with transformers."
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = [text for text in special if text not in known and tokenizer.token_to_id(text) is not None]
    tokenizer.add_tokens([AddedToken(text, special=True) for text in named])
    notes = {source: [token.content for token in fresh.values()], "the special tokens": named}
    return tuple(
        f"added tokens merged into the tokenizer from {origin}: {_shown(texts)}"
        for origin, texts in notes.items()
        if texts
    )


def _listed(
    folder: Path, config: Mapping[str, Any], special: Collection[str], present: Mapping[int, AddedToken]
) -> tuple[str, dict[int, AddedToken]]:
    """Which file lists added tokens, and the tokens by id."""
    if DECODER in config:
        where = f"{DECODER} of {folder / CONFIG_FILE}"
        return where, _read_decoder(config[DECODER], where, special)
    if not has_file(folder / LEGACY_FILE):
        return "", {}
    where, tokens = str(folder / LEGACY_FILE), {}
    for text, id_ in read_json(folder / LEGACY_FILE).items():
        if type(id_) is not int:
            raise CheckpointError(f"{where} gives {text!r} the id {id_!r}; a whole number is needed.")
        token = AddedToken(text, special=text in special, normalized=text not in special)
        there = present.get(id_)  # what tokenizer.json says of it is more than its text
        tokens[id_] = there if there is not None and there.content == text else token
    return where, tokens


def _read_decoder(content: Any, where: str, special: Collection[str]) -> dict[int, AddedToken]:
    try:
        tokens = {
            int(id_): AddedToken(entry["content"], **{flag: entry[flag] for flag in FLAGS if flag in entry})
            for id_, entry in content.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is damaged: an object of ids and added tokens is needed.") from error
    for token in tokens.values():
        token.special = token.special or token.content in special
    return tokens


def _shown(texts: list[str]) -> str:
    return ", ".join(map(repr, texts[:SHOWN])) + (", …" if len(texts) > SHOWN else "")
