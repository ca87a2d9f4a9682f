"""The text of an output that arrives in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.runtime.text.stream import TextStream
from dspark.runtime.text.tokenizer import TextProcessor
from tests.support.small_tokenizers import CORPUS, PROCESSORS, byte_fallback, every_tokenizer


def naive(processor: TextProcessor, ids: list[int], stop: tuple[str, ...]) -> tuple[str, bool, int]:
    """Decode everything after every token; cut at the first token that completes a stop string."""

    def cut(text: str) -> str | None:
        places = [text.index(string) for string in stop if string in text]
        return text[: min(places)] if places else None

    for count in range(1, len(ids) + 1):
        # U+FFFD at the end may be a character that is not complete yet.
        if (text := cut(processor.decode(ids[:count]).rstrip("\ufffd"))) is not None:
            return text, True, count
    text = processor.decode(ids)
    return (text, False, len(ids)) if cut(text) is None else (cut(text), True, len(ids))


def streamed(processor: TextProcessor, blocks: list[list[int]], stop: tuple[str, ...]) -> tuple[str, bool, int]:
    stream = TextStream(processor, stop)
    returned, kept = "", 0
    for block in blocks:
        returned += stream.push(block)
        kept += stream.kept
        assert stream.stopped or stream.kept == len(block)
    returned += stream.finish()
    assert returned == stream.text
    assert stream.finish() == ""
    return stream.text, stream.stopped, kept


def blocks_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    blocks, start = [], 0
    for size in sizes:
        blocks.append(ids[start : start + size])
        start += size
    return [*blocks, ids[start:]]


SIZES = st.lists(st.integers(0, 5), max_size=12)
TEXTS = st.text(st.sampled_from("theoxEND. \n,;züé東🙂\ufffd"), max_size=30) | st.text(max_size=20)

STOPS = st.lists(
    st.sampled_from(["END", "ND", "EN", "the", " ", "\n", "\n\n", "🙂", "東e", "x. ", "t", "\ufffd", "\ufffde"]),
    max_size=3,
).map(tuple)


@every_tokenizer
@given(text=TEXTS, sizes=SIZES, stop=STOPS)
def test_a_stream_of_text_equals_decoding_at_once(name, text, sizes, stop):
    processor = PROCESSORS[name]
    ids = processor.encode(text)
    assert streamed(processor, blocks_of(ids, sizes), stop) == naive(processor, ids, stop)


@every_tokenizer
@given(data=st.data(), sizes=SIZES, stop=STOPS)
def test_a_stream_of_any_tokens_equals_decoding_at_once(name, data, sizes, stop):
    """Bytes that are no characters, special tokens and ids without a token included."""
    ids = data.draw(st.lists(st.integers(0, 330), max_size=25))
    assert streamed(PROCESSORS[name], blocks_of(ids, sizes), stop) == naive(PROCESSORS[name], ids, stop)


@every_tokenizer
def test_a_long_output_equals_decoding_at_once(name):
    processor = PROCESSORS[name]
    ids = processor.encode(" ".join(CORPUS) * 20)
    assert streamed(processor, [ids[at : at + 3] for at in range(0, len(ids), 3)], ()) == (
        processor.decode(ids),
        False,
        len(ids),
    )


def test_text_comes_out_as_soon_as_it_is_decided():
    processor = PROCESSORS["byte-level"]
    ids = processor.encode("aꙮb")
    assert len(ids) == 5
    stream = TextStream(processor)
    assert [stream.push([token]) for token in ids] == ["a", "", "", "ꙮ", "b"]
    stream = TextStream(processor, ("bcd",))
    assert [stream.push(processor.encode(piece)) for piece in ("ab", "c", "e", "b")] == ["a", "", "bce", ""]
    assert stream.finish() == "b"
    assert not stream.stopped


def test_the_leading_space_of_an_output_is_decoded_like_the_whole():
    processor = PROCESSORS["llama"]
    the = processor.encode("the")[1]
    stream = TextStream(processor)
    assert [stream.push([token]) for token in (the, 2, the, 1, the)] == ["the", "", " the", "", " the"]
    empty = TextStream(processor)
    nothing = byte_fallback(strip=True).token_to_id("")
    assert [empty.push([token]) for token in (the, nothing, the)] == ["the", "", " the"]


def test_a_byte_run_is_not_returned_before_it_ends():
    processor = PROCESSORS["llama"]
    newline, broken, letter = 3 + 0x0A, 3 + 0xFF, processor.encode("xa")[-1]
    stream = TextStream(processor)
    assert [stream.push([token]) for token in (newline, letter, newline, broken, letter)] == ["", "\na", "", "", "��a"]


def test_a_stop_string_of_byte_tokens_stops_at_its_last_byte():
    processor = PROCESSORS["llama"]
    letter, newline = processor.encode("xa")[-1], 3 + 0x0A
    stream = TextStream(processor, ("\n\n",))
    assert stream.push([letter, newline, newline, letter]) == "a"
    assert (stream.stopped, stream.kept, stream.text) == (True, 3, "a")


def test_of_two_stop_strings_in_a_token_the_one_that_begins_first_cuts():
    processor = PROCESSORS["gemma"]
    (token,) = processor.encode("END")[1:]
    for stop in (("ND", "END"), ("END", "ND")):
        stream = TextStream(processor, stop)
        assert stream.push([token]) == stream.text == ""
        assert stream.stopped


@pytest.mark.parametrize("slot", range(6))
def test_a_stop_string_ends_a_block_at_every_slot(slot):
    processor = PROCESSORS["characters"]
    stream = TextStream(processor, ("STOP",))
    block = processor.encode("xSTO" + "abcdefgh")
    ahead, rest = processor.encode("..STOP"[: 2 + max(0, 3 - slot)]), processor.encode("xxSTOP"[max(0, 5 - slot) :])
    assert stream.push(ahead) == ".."
    returned = stream.push([*rest, *block])
    assert stream.stopped
    assert stream.kept == slot + 1
    assert returned == "xx"[: max(0, slot - 3)]
    assert stream.text == ".." + returned
    assert stream.push(block) == stream.finish() == ""
    assert stream.kept == 0


def test_a_stop_string_that_is_only_begun_is_text():
    processor = PROCESSORS["characters"]
    stream = TextStream(processor, ("\n\nUser:", "END"))
    assert stream.push(processor.encode("EN\n\nUser")) == "EN"
    assert stream.finish() == "\n\nUser"
    assert not stream.stopped
