"""Tokenizers from GGUF metadata must encode and decode as the model's own tokenizer."""

import json
import unicodedata
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dspark.exporter.checkpoints import gguf_tokenizer
from dspark.exporter.checkpoints.description import TextAssets
from dspark.exporter.checkpoints.gguf_file import read_gguf_file
from dspark.exporter.checkpoints.gguf_metadata import GgufMetadata
from dspark.exporter.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    int(getattr(gguf.TokenType, name)) for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE")
)

CORPUS = [
    "The quick brown fox doesn't jump over 12 lazy dogs, it'll run 3456 miles.  Then\n\nit sleeps!",
    "def merge(first, second):\n    return sorted(first + second)  # 100% of the items\n",
    "Xin chào Việt Nam, đường phố Hà Nội rất đẹp. Phở bò 45.000 đồng!",
    "日本語のテキスト、中文文本，한국어 텍스트。 Привет, мир! مرحبا",
    "HTTPServer camelCase snake_case I'M YOU'LL (a) [b] {c} <d> 🙂👩‍👩‍👧",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "\n",
    "\t\tx  \r\n y ",
    "e\u0301 \u00e9 \ufb01 \u212b",
    "1 22 333 4444 55555 ½ ² ٣ Ⅷ",
    "a\u00a0b\u2003c\u200bd\x00e",
    "don't  pay 1234!\n\n x",
    "!!??...  ---\n***//",
]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return encoded


def text_assets(metadata: Mapping[str, Any]) -> TextAssets:
    return gguf_tokenizer.text_assets(GgufMetadata("model.gguf", metadata))


def stop_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    return gguf_tokenizer.stop_token_ids(GgufMetadata("model.gguf", metadata))


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> str:
    return gguf_tokenizer.tokenizer_from_gguf(GgufMetadata("model.gguf", metadata))


def built(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_from_gguf(metadata))


# The pre-tokenizers as published in the models' own tokenizer.json, written out in full.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def published(name: str) -> Tokenizer:
    """An untrained tokenizer that splits as the published one of that kind."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "gpt-2":
        tokenizer.pre_tokenizer = byte_level
    elif name == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        pattern = {"llama-bpe": LLAMA3, "qwen2": QWEN2, "tekken": TEKKEN}[name]
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def trained(name: str) -> Tokenizer:
    tokenizer = published(name)
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """What llama.cpp's converter writes for that tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
    }


KINDS = ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[str, Tokenizer, Tokenizer]:
    """A kind's name, a trained tokenizer of it, and the one built from its GGUF metadata."""
    tokenizer = trained(request.param)
    return request.param, tokenizer, built(byte_level_metadata(tokenizer, request.param))


def test_byte_level_bpe_encodes_and_decodes_as_the_original(pair: tuple[str, Tokenizer, Tokenizer]) -> None:
    name, original, tokenizer = pair
    for text in TEXTS:
        expected = ids(original, text)
        assert ids(tokenizer, text) == expected, text
        kept = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        assert tokenizer.decode(expected) == kept


@given(text=st.text())
def test_any_text_survives_byte_level_bpe(text: str, pair: tuple[str, Tokenizer, Tokenizer]) -> None:
    name, original, tokenizer = pair
    encoded = ids(tokenizer, text)
    assert encoded == ids(original, text)
    assert tokenizer.decode(encoded) == (unicodedata.normalize("NFC", text) if name == "qwen2" else text)


TEXT = "don't  pay 1234!\n\n x"
SPLITS = {
    "gpt-2": ["don", "'t", " ", " pay", " 1234", "!", "\n\n", " x"],
    "default": ["don", "'", "t", " ", " pay", " ", "123", "4", "!", "\n\n", " x"],
    "smollm": ["don", "'t", " ", " pay", " ", "1", "2", "3", "4", "!", "\n\n", " x"],
    "llama-bpe": ["don", "'t", " ", " pay", " ", "123", "4", "!\n\n", " x"],
    "qwen2": ["don", "'t", " ", " pay", " ", "1", "2", "3", "4", "!\n\n", " x"],
    "tekken": ["don", "'t", " ", " pay", " ", "1", "2", "3", "4", "!\n\n", " x"],
    "deepseek-coder": ["don", "'", "t", " ", " pay", " ", "1", "2", "3", "4", "!", "\n", "\n", " x"],
    "seed-coder": ["don", "'t", " ", " pay", " ", "1", "2", "3", "4", "!", "\n\n", " x"],
}
ALIASES = {
    "starcoder": "smollm",
    "refact": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "mellum": "gpt-2",
}


def words(name: str | None, text: str) -> list[str]:
    metadata = byte_level_metadata(BYTES, name or "")
    if name is None:
        del metadata["tokenizer.ggml.pre"]
    pieces = built(metadata).pre_tokenizer.pre_tokenize_str(text)
    return [text[start:stop] for _, (start, stop) in pieces]


BYTES = Tokenizer(models.BPE({letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))


@pytest.mark.parametrize("name", [*SPLITS, *ALIASES])
def test_words_are_split_as_the_name_says(name: str) -> None:
    assert words(name, TEXT) == SPLITS[ALIASES.get(name, name)]


def test_tekken_splits_where_lower_case_ends() -> None:
    assert words("tekken", "HTTPServer camelCase//\n") == ["HTTPServer", " camel", "Case", "//\n"]
    assert words("llama-bpe", "HTTPServer camelCase//\n") == ["HTTPServer", " camelCase", "//\n"]


def test_no_name_means_the_default() -> None:
    assert words(None, TEXT) == SPLITS["default"]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"'mystery'; supported are .*llama-bpe.*qwen2.*smollm"):
        words("mystery", TEXT)


def test_whole_words_are_taken_without_merges_only_where_the_kind_does() -> None:
    for name, expected in (("llama-bpe", ["Ġworld"]), ("gpt-2", ["Ġ", *"world"])):
        metadata = byte_level_metadata(BYTES, name)
        metadata["tokenizer.ggml.tokens"].append("Ġworld")
        metadata["tokenizer.ggml.token_type"].append(NORMAL)
        assert built(metadata).encode(" world").tokens == expected


def with_tokens(metadata: dict[str, Any], *tokens: tuple[str, int]) -> dict[str, Any]:
    """The metadata with further tokens, each a text and a type, before all others."""
    old = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    return metadata | {
        "tokenizer.ggml.tokens": [*(text for text, _ in tokens), *old],
        "tokenizer.ggml.token_type": [*(kind for _, kind in tokens), *types],
    }


CHAT = (("<|end|>", CONTROL), ("<|start|>", CONTROL), ("<tool call>", USER_DEFINED), ("<pad>", UNUSED))


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = built(with_tokens(byte_level_metadata(BYTES, "gpt-2"), *CHAT))
    encoded = tokenizer.encode("<|start|>a<tool call>b<|end|>")
    assert encoded.tokens == ["<|start|>", "a", "<tool call>", "b", "<|end|>"]
    assert encoded.ids[0] == 1
    assert tokenizer.decode(encoded.ids) == "a<tool call>b"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<|start|>a<tool call>b<|end|>"
    assert tokenizer.encode("<pad>").tokens == list("<pad>")


@pytest.mark.parametrize("key", ["eos", "bos", "eot", "eom"])
def test_tokens_that_frame_texts_are_special_whatever_their_type(key: str) -> None:
    metadata = with_tokens(byte_level_metadata(BYTES, "gpt-2"), ("<|im_end|>", NORMAL), ("<|x|>", USER_DEFINED))
    for id_, text in enumerate(("<|im_end|>", "<|x|>")):
        tokenizer = built(metadata | {f"tokenizer.ggml.{key}_token_id": id_})
        assert tokenizer.encode(f"a{text}").tokens == ["a", text]
        assert tokenizer.decode(ids(tokenizer, f"a{text}b")) == "ab"


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("gpt-2", {}, ["a"]),
        ("gpt-2", {"add_bos_token": True}, ["<|start|>", "a"]),
        ("gpt-2", {"add_eos_token": True}, ["a", "<|end|>"]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<|start|>", "a", "<|end|>"]),
        ("llama-bpe", {}, ["<|start|>", "a"]),
        ("llama-bpe", {"add_bos_token": False}, ["a"]),
        ("tekken", {}, ["<|start|>", "a"]),
    ],
)
def test_texts_are_framed_as_the_file_or_the_kind_says(name: str, flags: dict[str, bool], expected: list[str]) -> None:
    metadata = with_tokens(byte_level_metadata(BYTES, name), *CHAT)
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 0}
    tokenizer = built(metadata | {f"tokenizer.ggml.{key}": value for key, value in flags.items()})
    assert tokenizer.encode("a").tokens == expected
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def test_a_kind_that_begins_with_bos_needs_none() -> None:
    assert built(byte_level_metadata(BYTES, "llama-bpe")).encode("a").tokens == ["a"]


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_framing_with_a_token_that_is_not_named_is_refused(name: str) -> None:
    metadata = byte_level_metadata(BYTES, "gpt-2") | {f"tokenizer.ggml.add_{name}_token": True}
    with pytest.raises(
        CheckpointError, match=f"add_{name}_token is set, but tokenizer.ggml.{name}_token_id is missing"
    ):
        built(metadata)


PIECES = {  # each can be put together in one way only; the scores are not in the order of the ids
    "▁": -1.0,
    **dict(zip("helowrdéđ", (-40.0 - index for index in range(9)), strict=True)),
    "he": -3.0,
    "ll": -2.5,
    "hell": -9.0,
    "hello": -4.0,
    "lo": -20.0,
    "▁hello": -12.0,
    "wo": -8.0,
    "rl": -5.0,
    "worl": -6.0,
    "world": -7.0,
    "▁world": -10.0,
    "▁▁": -11.0,
}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    tokens = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    tokens += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    tokens += [(piece, NORMAL, score) for piece, score in PIECES.items()]
    tokens += [("<tool>", USER_DEFINED, 0.0), ("dr", UNUSED, 5.0)]
    texts, types, scores = (list(column) for column in zip(*tokens, strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def sentencepiece(text: str, prefix: bool) -> list[str]:
    """SentencePiece's BPE, straight from its definition: merge the best neighbours, then spell the rest in bytes."""
    symbols = list((" " * prefix + text).replace(" ", "▁")) if text else []
    while True:
        scored = [
            (PIECES[left + right], -index)
            for index, (left, right) in enumerate(pairwise(symbols))
            if left + right in PIECES
        ]
        if not scored:
            break
        index = -max(scored)[1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    spelled = [[piece] if piece in PIECES else [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in symbols]
    return [piece for pieces in spelled for piece in pieces]


@pytest.mark.parametrize("prefix", [True, False])
@given(text=st.text(st.sampled_from("helowrdéđ  ▁\n🙂z")) | st.text())
def test_sentencepiece_bpe_follows_its_definition(text: str, prefix: bool) -> None:
    tokenizer = SENTENCEPIECE[prefix]
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.tokens == sentencepiece(text, prefix)
    assert tokenizer.decode(encoded.ids) == text.replace("▁", " ")


SENTENCEPIECE = {prefix: built(sentencepiece_metadata(add_space_prefix=prefix)) for prefix in (True, False)}


def test_sentencepiece_words() -> None:
    assert SENTENCEPIECE[True].encode("hello world").tokens == ["<s>", "▁hello", "▁world"]
    assert SENTENCEPIECE[False].encode("hello  world").tokens == ["<s>", "hello", "▁", "▁world"]
    assert SENTENCEPIECE[True].encode("🙂").tokens == ["<s>", "▁", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert built(sentencepiece_metadata(add_bos_token=False)).encode("hello").tokens == ["▁hello"]
    assert SENTENCEPIECE[True].encode("hello").ids[0] == 1


def test_sentencepiece_prefixes_a_space_after_every_special_token() -> None:
    encoded = SENTENCEPIECE[True].encode("hello</s>hello<tool>hello", add_special_tokens=False)
    assert encoded.tokens == ["▁hello", "</s>", "▁hello", "<tool>", "▁hello"]


def test_sentencepiece_has_default_special_tokens() -> None:
    metadata = sentencepiece_metadata(padding_token_id=0)
    assert text_assets(metadata).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<unk>",
    }
    assert stop_token_ids(metadata) == [2]
    assert stop_token_ids(sentencepiece_metadata(eos_token_id=9)) == [9]


def test_text_assets_of_a_chat_model() -> None:
    metadata = with_tokens(byte_level_metadata(BYTES, "smollm"), *CHAT) | {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages }}",
    }
    assets = text_assets(metadata)
    assert assets.tokenizer == tokenizer_from_gguf(metadata)
    assert assets.chat_template == "{{ bos_token }}{{ messages }}"
    assert assets.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_a_file_without_tokenizer_has_none() -> None:
    assets = text_assets({"general.architecture": "llama"})
    assert (assets.tokenizer, assets.chat_template, assets.special_tokens) == (None, None, {})


def test_stop_tokens_are_all_ends_once() -> None:
    keys = {"eos": 5, "eot": 3, "eom": 5}
    assert stop_token_ids({f"tokenizer.ggml.{key}_token_id": id_ for key, id_ in keys.items()}) == [3, 5]
    assert stop_token_ids({"tokenizer.ggml.model": "gpt2"}) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; supported are gpt2 and llama"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "has 'a' twice"),
        ({"tokens": ["a", "b"], "token_type": [1]}, "1 tokenizer.ggml.token_type for 2 tokens"),
        ({"merges": ["x yz"]}, "merges do not fit its vocabulary"),
        ({"merges": ["xy"]}, "merges do not fit its vocabulary"),
        ({"eos_token_id": 256}, "tokenizer.ggml.eos_token_id is 256, but there are 256 tokens"),
    ],
)
def test_damaged_byte_level_tokenizers_are_refused(changes: dict[str, Any], message: str) -> None:
    metadata = byte_level_metadata(BYTES, "gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        text_assets(metadata)


def test_damaged_sentencepiece_tokenizers_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"0 tokenizer.ggml.scores for \d+ tokens"):
        built(sentencepiece_metadata(scores=[]))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.unknown_token_id is 999"):
        built(sentencepiece_metadata(unknown_token_id=999))


# Ids that SmolLM2's own tokenizer gives.
SMOLLM2 = {
    (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nFind the area of a rectangle with length 58 and width 32.<|im_end|>\n<|im_start|>assistant\n"
    ): (
        "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 1 4093 198 11933 "
        "260 1557 282 253 23710 351 3519 216 37 40 284 8068 216 35 34 30 2 198 1 520 9531 198"
    ),
    (
        "```python\ndef merge_sorted_lists(list1, list2):\n    return list(sorted(list1 + list2))\n\n"
        "# Example usage:\nlist1 = [1, 2, 3, 4, 5]"
    ): (
        "3725 5367 198 1604 16905 79 25488 79 22372 24 2402 33 28 1398 34 727 472 1003 1398 24 25488 24 2402 33 1232 "
        "1398 34 1292 198 198 19 12066 6486 42 198 2402 33 446 933 33 28 216 34 28 216 35 28 216 36 28 216 37 77"
    ),
}


@pytest.mark.slow
def test_smollm2_encodes_as_its_own_tokenizer(smollm2_gguf: Path) -> None:
    assets = text_assets(read_gguf_file(smollm2_gguf).metadata)
    assert assets.tokenizer is not None
    tokenizer = Tokenizer.from_str(assets.tokenizer)
    for text, expected in SMOLLM2.items():
        assert tokenizer.encode(text).ids == [int(id_) for id_ in expected.split()]
    for text in [*TEXTS, *SMOLLM2]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 49152
    assert assets.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert assets.chat_template is not None
    assert "You are a helpful AI assistant named SmolLM" in assets.chat_template
