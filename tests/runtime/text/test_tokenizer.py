"""Text to token ids and back."""

import pytest

from dspark.runtime.errors import BundleError, RequestError
from dspark.runtime.text.tokenizer import TextProcessor
from tests.support.small_tokenizers import CORPUS, PROCESSORS, byte_level


def test_the_golden_tokenizer_is_a_character_code():
    processor = PROCESSORS["characters"]
    assert processor.encode("Hello\n") == [72, 101, 108, 108, 111, 10]
    assert processor.decode([72, 128, 105, 129]) == "Hi"


def test_special_tokens_come_from_the_post_processor():
    assert PROCESSORS["llama"].encode("a")[0] == 1
    ids = PROCESSORS["byte-level"].encode("the fox<|end|>")
    assert ids[-1] == 0
    assert 1 not in ids
    assert PROCESSORS["byte-level"].decode(ids) == "the fox"


def test_truncation_and_padding_of_the_file_do_not_apply():
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=100)
    processor = TextProcessor(tokenizer.to_str())
    assert processor.encode(CORPUS[0]) == PROCESSORS["byte-level"].encode(CORPUS[0])


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match=r"not valid Unicode: character 2 is '\\ud83d'"):
        PROCESSORS["byte-level"].encode("ab\ud83d")


def test_an_unreadable_tokenizer_is_refused():
    with pytest.raises(BundleError, match="tokenizer cannot be read"):
        TextProcessor('{"version": "1.0"}')
