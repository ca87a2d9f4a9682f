"""Text to token ids and back, chat templates, and the text of an output that arrives in pieces."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dspark.runtime.errors import BundleError, RequestError
from dspark.runtime.text.stream import TextStream
from dspark.runtime.text.tokenizer import TextProcessor

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

# --- tokens ---


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


# --- chat ---

CHATML = """{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- "<|start|>" + message.role + "\\n" + message.content + "<|end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant\\n" }}{%- endif %}"""


def chat(template: str, messages: object, tokenizer: Tokenizer | None = None, **special_tokens: str) -> str:
    """The rendered conversation, read back from its ids with the special tokens."""
    tokenizer = tokenizer or byte_level()
    ids = TextProcessor(tokenizer.to_str(), template, special_tokens).encode_chat(messages)
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_a_conversation_ends_where_the_answer_begins():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the fox?"}]
    expected = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nthe fox?<|end|>\n<|start|>assistant\n"
    assert chat(CHATML, messages) == expected
    ids = TextProcessor(byte_level().to_str(), CHATML).encode_chat(messages)
    assert (ids.count(0), ids.count(1)) == (2, 3)


def test_the_beginning_of_text_is_written_once():
    template = "{{ bos_token }}{{ messages[0].content }}"
    processor = TextProcessor(byte_fallback(strip=True).to_str(), template, {"bos_token": "<s>"})
    assert processor.encode_chat([{"role": "user", "content": "a"}]).count(1) == 1
    processor = TextProcessor(byte_fallback(strip=True).to_str(), "{{ messages[0].content }}")
    assert processor.encode_chat([{"role": "user", "content": "a"}]).count(1) == 0


def test_templates_find_what_they_are_written_for():
    template = """
    {%- for message in messages -%}
        {%- if loop.index > 1 %}{% break %}{% endif -%}
        {{ message | tojson }}|{{ message | tojson(indent=1) | length }}|{{ strftime_now("%Y") | length }}
        {%- if tools is not none or documents is not none %}|tools{% endif %}
        {%- if missing is defined %}|missing{% endif %}
        {%- generation %}|{{ message.role }}{% endgeneration %}
    {%- endfor %}
"""
    message = {"role": "user", "content": "<é>"}
    length = len(json.dumps(message, indent=1, ensure_ascii=False))
    assert chat(template, [message, message]) == f'{{"role": "user", "content": "<é>"}}|{length}|4|user'


def test_blocks_are_trimmed():
    assert chat("{% if true %}\n    {% if true %}\nx\n    {% endif %}\n{% endif %}\n", [CHATTY]) == "x\n"


CHATTY = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "template",
    [CHATML, "{{ bos_token }}{% for m in messages %}\n  {{ m | tojson }}\n{% endfor %}\n{{ tools is none }}"],
)
def test_rendering_equals_transformers(template):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [CHATTY, {"role": "assistant", "content": "\"hello\" 'é' <b>\n"}, CHATTY]
    (expected,), _ = utils.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<|start|>"
    )
    assert chat(template, messages, bos_token="<|start|>") == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (CHATTY, "non-empty list"),
        (None, "non-empty list"),
        (["hi"], "message 0 must have the keys 'role' and 'content', not 'hi'"),
        ([CHATTY, {"role": "user"}], r"message 1 must have the keys 'role' and 'content', not the keys \['role'\]"),
        ([CHATTY | {"contnet": "x"}], "message 0 must have the keys"),
        ([{"role": "user", "content": None}], "the content of message 0 must be a string, not None"),
        ([{"role": 1, "content": "x"}], "the role of message 0 must be a string, not 1"),
        ([{"role": "robot", "content": "x"}], "the chat template refuses the messages: unknown role robot"),
    ],
)
def test_bad_messages_are_refused(messages, message):
    with pytest.raises(RequestError, match=message):
        chat(CHATML, messages)


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content + 1 }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}{{ x.y }}"]
)
def test_a_template_that_fails_is_a_refusal(template):
    with pytest.raises(RequestError, match="chat template refuses"):
        chat(template, [CHATTY])


def test_a_template_that_is_no_template_is_refused():
    with pytest.raises(BundleError, match="line 2 of the chat template is not valid Jinja"):
        chat("a\n{% for %}", [CHATTY])


def test_without_a_template_there_is_no_chat():
    assert not PROCESSORS["characters"].has_chat_template
    assert TextProcessor(byte_level().to_str(), CHATML).has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        PROCESSORS["characters"].encode_chat([CHATTY])


def test_jinja_is_imported_by_the_first_conversation_only():
    code = """
import sys
from dspark.runtime.text.tokenizer import TextProcessor
from dspark.runtime.text.stream import TextStream
processor = TextProcessor(sys.stdin.read(), "{{ messages[0].content }}")
TextStream(processor).push(processor.encode("hi"))
assert "jinja2" not in sys.modules
processor.encode_chat([{"role": "user", "content": "hi"}])
assert "jinja2" in sys.modules
"""
    tokenizer = (GOLDEN / "qwen3_target" / "tokenizer.json").read_text(encoding="utf-8")
    subprocess.run([sys.executable, "-c", code], input=tokenizer, encoding="utf-8", check=True)


# --- streams ---


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
