"""From a prompt, as users give it, to a checked request for the engine."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from dspark.runtime.arguments import check_argument
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.request import Priority, Request
from dspark.runtime.errors import RequestError
from dspark.runtime.text.stream import TextStream
from dspark.runtime.text.tokenizer import TextProcessor

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = ["Prompt", "PromptReader"]

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""


class PromptReader:
    """Checks prompts and makes requests of them.

    Args:
        bundle: Tells vocabulary, stop tokens, tokenizer and chat template.
        context_length: Tokens of the longest text, prompt and output together.
        cache_tokens: Tokens that the cache has room for; None: as many as are asked for.

    Attributes:
        text: Turns text into ids and back; None if the bundle has no tokenizer.
    """

    def __init__(self, bundle: Bundle, context_length: int, cache_tokens: int | None = None) -> None:
        target = bundle.manifest.target
        self.text = _text_processor(bundle)
        self._vocabulary_size = target.vocabulary_size
        self._stop_token_ids = frozenset(target.stop_token_ids)
        self._context_length = context_length
        self._cache_tokens = cache_tokens

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: Text, chat messages, or token ids, which are taken as they are.
            raw: Whether text is taken as it is, without the chat template.

        Raises:
            RequestError: The prompt is malformed, or the bundle lacks the tokenizer or template that it needs.
        """
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
            raise RequestError(f"a prompt must be text, token ids or chat messages, not {prompt!r}")
        if _are_ids(prompt):
            return [int(token) for token in prompt]
        if self.text is None:
            raise RequestError("this bundle has no tokenizer; give prompts as token ids")
        if _are_messages(prompt):
            return self.text.encode_chat(prompt)
        if raw or not self.text.has_chat_template:
            return self.text.encode(prompt)
        return self.text.encode_chat([{"role": "user", "content": prompt}])

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        priority: Priority = "interactive",
        prefix: KeyValueCache | None = None,
        keep_cache: bool = False,
    ) -> Request:
        """A request, to be submitted to an engine.

        Args:
            prompt: Text, chat messages, or token ids.
            params: Sampling options; greedy by default.
            raw: Whether text is taken as it is, without the chat template.
            priority: See ``Request``.
            prefix: See ``Request``.
            keep_cache: See ``Request``.

        Raises:
            RequestError: The prompt is empty, too long, malformed, or has ids outside the vocabulary, or there is no
                such priority.
        """
        if priority not in get_args(Priority):
            raise RequestError(f"priority is {priority!r}; there are {' and '.join(get_args(Priority))}")
        check_argument("params", params, (SamplingParams, type(None)), "SamplingParams(…)")
        check_argument("prefix", prefix, (KeyValueCache, type(None)), "the cache of an ended request")
        check_argument("raw", raw, bool, "True or False")
        params = params or SamplingParams()
        prompt_ids = self.encode(prompt, raw=raw)
        size = self._vocabulary_size
        if not prompt_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        outside = [token for token in prompt_ids if not 0 <= token < size]
        if outside:
            raise RequestError(f"prompt_ids has {outside[0]}, which is outside the vocabulary (0 to {size - 1})")
        total = len(prompt_ids) + params.max_new_tokens
        sizes = f"the prompt's {len(prompt_ids)} tokens and max_new_tokens {params.max_new_tokens} make {total}"
        if total > self._context_length:
            raise RequestError(f"{sizes}; the limit is {self._context_length}")
        if self._cache_tokens is not None and total > self._cache_tokens:
            raise RequestError(f"{sizes}; the cache has room for {self._cache_tokens} (max_cache_tokens)")
        if params.stop and self.text is None:
            raise RequestError("stop strings need a tokenizer, and this bundle has none")
        stops = self._stops(params)
        sampler = Sampler(params, prompt_ids, size, stops)
        stream = TextStream(self.text, params.stop) if self.text is not None else None
        return Request(prompt_ids, sampler, stops, stream, prefix=prefix, keep_cache=keep_cache, priority=priority)

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        """The model's stop tokens, those asked for, and those of stop strings that are special tokens."""
        outside = [token for token in params.stop_token_ids if token >= self._vocabulary_size]
        if outside:
            raise RequestError(
                f"stop_token_ids names token {outside[0]}; the vocabulary ends at {self._vocabulary_size - 1}"
            )
        spelled = [self.text.special_id(text) for text in params.stop] if self.text is not None else []
        return self._stop_token_ids.union(params.stop_token_ids, (token for token in spelled if token is not None))


def _are_ids(prompt: Prompt) -> "TypeIs[Sequence[int]]":
    return not isinstance(prompt, str) and all(
        isinstance(item, Integral) and not isinstance(item, bool) for item in prompt
    )


def _are_messages(prompt: str | Sequence[Mapping[str, Any]]) -> "TypeIs[Sequence[Mapping[str, Any]]]":
    return not isinstance(prompt, str)


def _text_processor(bundle: Bundle) -> TextProcessor | None:
    text = bundle.manifest.text
    if text.tokenizer is None:
        return None
    template = None if text.chat_template is None else bundle.text(text.chat_template)
    return TextProcessor(bundle.text(text.tokenizer), template, text.special_tokens)
