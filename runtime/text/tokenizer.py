"""Between text and token ids: the tokenizer, and the text of a growing output."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from dspark.runtime.errors import BundleError, RequestError

if TYPE_CHECKING:
    from dspark.runtime.text.chat_template import ChatTemplate

from dspark.runtime.text.messages import check_messages

__all__ = ["TextProcessor"]


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
        check_messages(messages)
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
        from dspark.runtime.text.chat_template import ChatTemplate

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
