"""Tokenizers of every kind, small enough to be made when tests start."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dspark.runtime.text.tokenizer import TextProcessor

__all__ = ["CORPUS", "GOLDEN", "PROCESSORS", "byte_fallback", "byte_level", "every_tokenizer", "metaspace"]

GOLDEN = Path(__file__).parents[1] / "golden"

CORPUS = [
    "the quick brown fox jumps over the lazy dog. the dog sleeps, the fox runs; über die Brücke geht der Fuchs.",
    "def f(x):\n    return x + 1\n\n\nprint(f(2))  # three\n",
    "naïve café — 東京 🙂🙃 👩‍👩‍👧 done. ENDING END EN",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|end|>", "<|start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def byte_fallback(*, strip: bool) -> Tokenizer:
    """A SentencePiece BPE as Llama 2 (leading space stripped) or Gemma (kept) ship it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzEND.,;", "th", "the", "▁the", "▁▁", "▁▁▁▁", "EN", "END", "\u00fc", ""]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("▁▁", "▁▁"), ("E", "N"), ("EN", "D")]
    model = models.BPE(
        {piece: index for index, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if strip else "never", split=False)
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if strip else chain)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = ["<unk>", *CORPUS[0], "▁", "▁the", "▁f", "ox", "▁▁", "üb"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in dict.fromkeys(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


PROCESSORS = {
    "byte-level": TextProcessor(byte_level().to_str()),
    "llama": TextProcessor(byte_fallback(strip=True).to_str()),
    "gemma": TextProcessor(byte_fallback(strip=False).to_str()),
    "metaspace": TextProcessor(metaspace().to_str()),
    "characters": TextProcessor((GOLDEN / "qwen3_target" / "tokenizer.json").read_text(encoding="utf-8")),
}

every_tokenizer = pytest.mark.parametrize("name", PROCESSORS)
