"""The tokenizer in a GGUF file, as the ``tokenizer.json`` that every host reads.

GGUF names a tokenizer's kind and holds its vocabulary; how the kind splits text is agreed on by name. The names and
what they stand for are llama.cpp's (``src/llama-vocab.cpp``); the patterns are those of the models' own
``tokenizer.json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dspark.exporter.checkpoints.description import TextAssets
from dspark.exporter.checkpoints.gguf_metadata import GgufMetadata
from dspark.exporter.errors import CheckpointError

__all__ = ["stop_token_ids", "text_assets", "tokenizer_from_gguf"]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
SEED_CODER = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"


@dataclass(frozen=True)
class Split:
    """How a kind of byte-level BPE cuts text into the words that are merged within.

    Attributes:
        patterns: Applied one after the other; each isolates its matches in what the ones before have left.
        composed: Whether text is first brought into Unicode's composed form (NFC).
        whole_words: Whether a word that is in the vocabulary is taken without merging.
        begins: Whether texts begin with the BOS token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    composed: bool = False
    whole_words: bool = False
    begins: bool = False


DIGITS_ALONE = Split((r"\p{N}", GPT2))
LLAMA3_SPLIT = Split((LLAMA3,), whole_words=True, begins=True)
QWEN2_SPLIT = Split((QWEN2,), composed=True)

SPLITS = {
    "default": Split((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9]{3}")),
    "gpt-2": Split((GPT2,)),
    "mellum": Split((GPT2,)),
    "trillion": Split((GPT2,)),
    "smollm": DIGITS_ALONE,
    "starcoder": DIGITS_ALONE,
    "refact": DIGITS_ALONE,
    "codeshell": DIGITS_ALONE,
    "minerva-7b": DIGITS_ALONE,
    "llama-bpe": LLAMA3_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "llama-v3": LLAMA3_SPLIT,
    "falcon3": LLAMA3_SPLIT,
    "smaug-bpe": Split((LLAMA3,)),
    "qwen2": QWEN2_SPLIT,
    "deepseek-r1-qwen": QWEN2_SPLIT,
    "megrez": QWEN2_SPLIT,
    "tekken": Split((TEKKEN,), whole_words=True, begins=True),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "seed-coder": Split((SEED_CODER,)),
}

# A SentencePiece tokenizer has these ids unless the file says otherwise.
SENTENCEPIECE_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}

MODEL = "tokenizer.ggml.model"

SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

TURN_ENDS = ("eot", "eom")

END_SPELLINGS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|return|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
    )
)
"""Control tokens that end a text or a turn whether or not a key names them, as llama.cpp has it."""

SPACE = "▁"  # stands for a space in SentencePiece's pieces


def text_assets(metadata: GgufMetadata) -> TextAssets:
    """The tokenizer, the chat template and the special tokens' texts.

    Args:
        metadata: A GGUF file's keys and values.

    Returns:
        What the file holds of them.

    Raises:
        CheckpointError: If its tokenizer is damaged or of an unsupported kind.
    """
    chat_template = metadata.find(str, "tokenizer.chat_template")
    if "tokenizer.ggml.tokens" not in metadata:
        note = f"{metadata.where} has no tokenizer: the bundle takes token ids, no text"
        return TextAssets(None, chat_template, {}, notes=(note,))
    return TextAssets(
        tokenizer_from_gguf(metadata),
        chat_template,
        _special_tokens(metadata),
        vocabulary=_vocabulary(metadata),
        ends=_spelled_ends(metadata),
        notes=_dropped_ids(metadata),
    )


def stop_token_ids(metadata: GgufMetadata) -> list[int]:
    """The ids that keys say end a text or a turn, sorted: end of sequence, of turn, and of message."""
    turn_ends = (metadata.find(int, f"tokenizer.ggml.{name}_token_id") for name in TURN_ENDS)
    return sorted({id_ for id_ in (_special_ids(metadata).get("eos_token"), *turn_ends) if id_ is not None})


def tokenizer_from_gguf(metadata: GgufMetadata) -> str:
    """Builds the tokenizer of a GGUF file.

    Args:
        metadata: The file's keys and values: ``tokenizer.ggml.model`` is ``gpt2`` (byte-level BPE, split as
            ``tokenizer.ggml.pre`` says) or ``llama`` (SentencePiece BPE with scores and byte fallback).

    Returns:
        The content of the ``tokenizer.json`` that encodes and decodes as the model's own tokenizer does.

    Raises:
        CheckpointError: If the tokenizer is damaged or of an unsupported kind.
    """
    kind = metadata.find(str, MODEL)
    if kind == "gpt2":
        split = _split(metadata)
        tokenizer, begins = _byte_level_bpe(metadata, split), split.begins
    elif kind == "llama":
        tokenizer, begins = _sentencepiece_bpe(metadata), True
    else:
        raise CheckpointError(f"tokenizer.ggml.model is {kind!r}; supported are gpt2 and llama.")
    tokenizer.add_tokens(_added_tokens(metadata))
    tokenizer.post_processor = _framing(metadata, begins)
    text: str = tokenizer.to_str(pretty=False)
    return text


def _byte_level_bpe(metadata: GgufMetadata, split: Split) -> Tokenizer:
    """Byte-level BPE as in GPT-2: every byte is a letter, so that no text is unknown."""
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.find_all(str, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(_bpe(_vocabulary(metadata), merges, ignore_merges=split.whole_words))
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(metadata: GgufMetadata) -> Tokenizer:
    """SentencePiece BPE: the best-scored piece that two neighbours form is merged first, over the whole text."""
    vocabulary = _vocabulary(metadata)
    merges = _merges_by_score(metadata, vocabulary)
    unknown = _special_tokens(metadata)["unk_token"]
    tokenizer = Tokenizer(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.find(bool, "tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefixed else replace
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefixed else []),
        ]
    )
    return tokenizer


def _merges_by_score(metadata: GgufMetadata, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to put a normal piece together from two pieces, best score first."""
    scores = metadata.find_all(float, "tokenizer.ggml.scores")
    types = _types(metadata)
    if len(scores) != len(vocabulary):
        raise CheckpointError(f"{len(scores)} tokenizer.ggml.scores for {len(vocabulary)} tokens.")
    normal = {token: id_ for token, id_ in vocabulary.items() if types[id_] == gguf.TokenType.NORMAL}
    merges = [
        (-scores[id_], id_, cut, token[:cut], token[cut:])
        for token, id_ in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _bpe(vocabulary: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # the library raises no narrower type
        raise CheckpointError(f"The tokenizer's merges do not fit its vocabulary: {error}.") from error


def _added_tokens(metadata: GgufMetadata) -> list[AddedToken]:
    """Tokens that are found in a text before it is split: control tokens are special, user-defined ones are text.

    A few converters give the tokens that frame a text another type; those are special all the same.
    """
    frame = {*stop_token_ids(metadata), _special_ids(metadata).get("bos_token")}
    special = {gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN}
    return [
        AddedToken(token, special=kind in special or id_ in frame, normalized=False)
        for id_, (token, kind) in enumerate(zip(_tokens(metadata), _types(metadata), strict=True))
        if kind in {*special, gguf.TokenType.USER_DEFINED} or id_ in frame
    ]


def _framing(metadata: GgufMetadata, begins: bool) -> processors.TemplateProcessing:
    """Puts BOS before and EOS after every encoded text, where the file says so."""
    ids, texts = _special_ids(metadata), _special_tokens(metadata)
    wanted = {
        "bos_token": metadata.find(bool, "tokenizer.ggml.add_bos_token", begins and "bos_token" in ids),
        "eos_token": metadata.find(bool, "tokenizer.ggml.add_eos_token", False),
    }
    for name, added in wanted.items():
        if added and name not in ids:
            raise CheckpointError(f"tokenizer.ggml.add_{name} is set, but {SPECIAL_TOKENS[name]} is missing.")
    bos, eos = ([texts[name]] if added else [] for name, added in wanted.items())
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos], special_tokens=[(texts[name], ids[name]) for name, added in wanted.items() if added]
    )


def _split(metadata: GgufMetadata) -> Split:
    name = metadata.find(str, "tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise CheckpointError(f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(SPLITS))}.")
    return SPLITS[name]


def _spelled_ends(metadata: GgufMetadata) -> dict[int, str]:
    """Control tokens whose text says that they end a text, each with why it is one."""
    return {
        id_: f"{token!r}, a control token of that name"
        for id_, (token, kind) in enumerate(zip(_tokens(metadata), _types(metadata), strict=True))
        if kind == gguf.TokenType.CONTROL and token in END_SPELLINGS
    }


def _special_tokens(metadata: GgufMetadata) -> dict[str, str]:
    """Texts of the special tokens a chat template can name."""
    tokens, ids = _tokens(metadata), _special_ids(metadata)
    for name, id_ in ids.items():
        if not 0 <= id_ < len(tokens):
            raise CheckpointError(f"{SPECIAL_TOKENS[name]} is {id_}, but there are {len(tokens)} tokens.")
    return {name: tokens[id_] for name, id_ in ids.items()}


def _special_ids(metadata: GgufMetadata) -> dict[str, int]:
    """Ids of the special tokens; those that nothing uses may lie outside the vocabulary and are left out then."""
    ids = _named_ids(metadata)
    outside = _outside(metadata, ids)
    return {name: id_ for name, id_ in ids.items() if name not in outside}


def _dropped_ids(metadata: GgufMetadata) -> tuple[str, ...]:
    ids = _named_ids(metadata)
    return tuple(
        f"{SPECIAL_TOKENS[name]} is {ids[name]}, but there are {len(_tokens(metadata))} tokens; nothing uses it, so it "
        "is left out"
        for name in _outside(metadata, ids)
    )


def _outside(metadata: GgufMetadata, ids: Mapping[str, int]) -> list[str]:
    """Special tokens outside the vocabulary that nothing uses."""
    used = {"eos_token"}
    if metadata.find(bool, "tokenizer.ggml.add_bos_token", True):
        used.add("bos_token")
    if metadata.find(str, MODEL) == "llama":
        used.add("unk_token")
    return [name for name, id_ in ids.items() if name not in used and not 0 <= id_ < len(_tokens(metadata))]


def _named_ids(metadata: GgufMetadata) -> dict[str, int]:
    defaults = SENTENCEPIECE_IDS if metadata.find(str, MODEL) == "llama" else {}
    ids = {name: metadata.find(int, key) for name, key in SPECIAL_TOKENS.items()}
    found = {name: defaults.get(name) if id_ is None else id_ for name, id_ in ids.items()}
    return {name: id_ for name, id_ in found.items() if id_ is not None}


def _tokens(metadata: GgufMetadata) -> list[str]:
    return metadata.find_all(str, "tokenizer.ggml.tokens")


def _types(metadata: GgufMetadata) -> list[int]:
    tokens = _tokens(metadata)
    types = metadata.find_all(int, "tokenizer.ggml.token_type") or [gguf.TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{len(types)} tokenizer.ggml.token_type for {len(tokens)} tokens.")
    return types


def _vocabulary(metadata: GgufMetadata) -> dict[str, int]:
    tokens = _tokens(metadata)
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for id_, token in enumerate(tokens) if vocabulary[token] != id_)
        raise CheckpointError(f"tokenizer.ggml.tokens has {twice!r} twice.")
    return vocabulary
