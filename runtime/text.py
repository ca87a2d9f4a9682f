"""Between text and token ids: the tokenizer, and the text of a growing output."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from dspark.runtime.errors import BundleError, RequestError

if TYPE_CHECKING:
    from dspark.runtime.chat_template import ChatTemplate

__all__ = ["TextProcessor", "TextStream"]

_REPLACEMENT = "\ufffd"  # what decoding puts where bytes are no character (yet)


class TextProcessor:
    """Turns prompts and conversations into token ids, and token ids into text.

    Args:
        tokenizer_json: The content of a ``tokenizer.json``.
        chat_template: Jinja template that writes a conversation as one prompt; None if there is none.
        special_tokens: Variables of the template, such as ``bos_token`` → ``<s>``.

    Raises:
        BundleError: The tokenizer cannot be read.
    """

    def __init__(
        self,
        tokenizer_json: str,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # tokenizers raises nothing more specific
            raise BundleError(f"the tokenizer cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, content in added.items() if content.special)
        self._source = chat_template
        self._special_tokens = dict(special_tokens or {})

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` works."""
        return self._source is not None

    def encode(self, text: str) -> list[int]:
        """The token ids of raw text, with the special tokens that the tokenizer itself puts around it.

        Raises:
            RequestError: The text is not valid Unicode.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins.

        The template writes every special token, as in Hugging Face ``apply_chat_template``; none is added to it.

        Args:
            messages: ``{"role": …, "content": …}`` each, both strings.

        Raises:
            RequestError: There is no template, the messages have another form, or the template refuses them.
            BundleError: The template is not valid Jinja.
        """
        if self._source is None:
            raise RequestError("the bundle has no chat template; give a raw prompt instead of messages")
        _check_messages(messages)
        return self._encode(self._template.render(messages), add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def is_silent(self, token: int) -> bool:
        """Whether a token never appears in text: special, or in the model's vocabulary only."""
        return token in self._special_ids or self._tokenizer.id_to_token(token) is None

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The tokens ``<0x00>``…``<0xFF>`` if they stand for single bytes (SentencePiece's byte fallback)."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = ((name, self._tokenizer.token_to_id(name)) for name in names)
        return frozenset(token for name, token in ids if token is not None and self.decode([token]) != name)

    @cached_property
    def _template(self) -> "ChatTemplate":
        # Jinja takes a tenth of the cold start, and raw prompts do not need it.
        from dspark.runtime.chat_template import ChatTemplate

        assert self._source is not None
        return ChatTemplate(self._source, self._special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: character {error.start} is {text[error.start]!r}, half of a pair"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


class TextStream:
    """The text of one output while its tokens arrive, up to the first stop string.

    Text is *decided* when no later token can change it. Two things keep it open: a character whose bytes are still
    incomplete, and a run of byte-fallback tokens, all of which turn into U+FFFD if the whole run is not valid UTF-8.
    A stop string counts as soon as the tokens so far spell it, open or not; the search goes token by token, and among
    stop strings that one token completes the one that begins first wins.

    Args:
        processor: Decodes the tokens.
        stop: Non-empty strings that end the text.

    Attributes:
        text: The decided text; after ``finish`` all of it, without the stop string.
        stopped: Whether a stop string ended the text.
        kept: How many tokens of the last push belong to the output. The last of them completed the stop string if one
            was found.
    """

    def __init__(self, processor: TextProcessor, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self.kept = 0
        self._processor = processor
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._returned = 0  # characters of ``text`` that pushes have returned
        # Decoding all tokens anew at every push would take quadratic time. Only the window is decoded; its first token
        # is there because a decoder treats a first token differently: the window's first ``_overlap`` characters are
        # its text, and so are the last ones of the first ``_before`` characters of ``text``.
        self._window: list[int] = []
        self._overlap = 0
        self._before = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that they decide beyond what was returned before.

        Text that may be the beginning of a stop string is returned once it is known not to be. Tokens after the one
        that completed a stop string are ignored.
        """
        self.kept = 0
        for token in token_ids:
            if self.stopped:
                break
            self.kept += 1
            if not self._processor.is_silent(token):
                self._read(token)
        return self._return_up_to(len(self.text) - self._undecided())

    def finish(self) -> str:
        """Ends the output and returns the rest of its text."""
        if not self.stopped and not self._stops_in(spelled := self._spelled()):
            self.text = spelled
        return self._return_up_to(len(self.text))

    def _read(self, token: int) -> None:
        self._window.append(token)
        spelled = self._spelled()
        whole = spelled.rstrip(_REPLACEMENT)
        if self._stops_in(whole) or token in self._processor.byte_ids:
            return
        self.text = whole
        if whole == spelled:
            self._move_window(token)

    def _spelled(self) -> str:
        """All text so far as the tokenizer would decode it now."""
        return self.text[: self._before] + self._processor.decode(self._window)[self._overlap :]

    def _stops_in(self, text: str) -> bool:
        """Whether ``text``, the decided text and more, holds a stop string; if so, the output ends there."""
        found = [at for stop in self._stop if (at := text.find(stop, max(0, len(self.text) - len(stop) + 1))) >= 0]
        if found:
            self.text = text[: min(found)]
            self.stopped = True
        return self.stopped

    def _move_window(self, token: int) -> None:
        """Begins the window at its last token."""
        alone = self._processor.decode([token])
        if alone.strip():  # else what a decoder strips from the beginning would reach into the next token
            self._window = [token]
            self._overlap = len(alone)
            self._before = len(self.text)

    def _undecided(self) -> int:
        """Length of the longest end of ``text`` with which a stop string begins."""
        if self.stopped:
            return 0
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0

    def _return_up_to(self, end: int) -> str:
        fresh = self.text[self._returned : end]
        self._returned = end
        return fresh


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(f"messages must be a non-empty list, not {messages!r}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            given = f"the keys {sorted(map(str, message))}" if isinstance(message, Mapping) else repr(message)
            raise RequestError(f"message {index} must have the keys 'role' and 'content', not {given}")
        for key, value in message.items():
            if not isinstance(value, str):
                raise RequestError(f"the {key} of message {index} must be a string, not {value!r}")
