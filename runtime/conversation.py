"""A conversation that keeps its cache from turn to turn."""

from collections.abc import Generator
from contextlib import closing
from itertools import takewhile

from dspark.runtime.arguments import check_argument
from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.errors import RequestError
from dspark.runtime.inference import Chunk, DSparkInference

__all__ = ["Conversation"]


class Conversation:
    """Messages with a model; those that it has read before are not computed again.

    Args:
        inference: The loaded bundle.
        system: A system message to begin with.

    Attributes:
        messages: The messages so far.
        reused_tokens: Prompt tokens of the last turn that were in the cache already.

    Raises:
        RequestError: The bundle has no chat template, or an argument is of another type.
    """

    def __init__(self, inference: DSparkInference, system: str | None = None) -> None:
        check_argument("inference", inference, DSparkInference, "a loaded bundle")
        check_argument("system", system, (str, type(None)), "text")
        if inference.text is None or not inference.text.has_chat_template:
            raise RequestError("this bundle has no chat template, which a conversation needs; use generate")
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.reused_tokens = 0
        self._inference = inference
        self._cache: KeyValueCache | None = None
        self._cached_ids: list[int] = []

    def reply(self, text: str, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """Adds a user's message and yields the answer as it is decided.

        An answer that is broken off, by closing the iterator or by an error, counts as far as it got; a refused message
        does not count.

        Raises:
            RequestError: The conversation no longer fits the context, the template refuses it, or it is no text.
            NumericalError: The model returned values that are not finite.
        """
        check_argument("text", text, str, "text")
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt_ids = self._inference.encode(asked)
        prefix = self._prefix(prompt_ids)
        request = self._inference.request(prompt_ids, params, prefix=prefix, keep_cache=True)
        answer: list[str] = []
        try:
            with closing(self._inference.follow(request)) as chunks:
                for chunk in chunks:
                    answer.append(chunk.text)
                    yield chunk
        finally:
            self._cache = request.cache
            self._cached_ids = request.prompt_ids + request.output_ids
            self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]

    def _prefix(self, prompt_ids: list[int]) -> KeyValueCache | None:
        """The cache, cut to what the prompt has in common with it; the last common token is computed anew."""
        self.reused_tokens = 0
        if self._cache is None:
            return None
        pairs = zip(prompt_ids, self._cached_ids, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # EAGLE-3 pairs every cached token with the next one, so that one must be common too.
        self._cache.truncate(0, max(common - 1, 0))
        self.reused_tokens = int(self._cache.lengths[:, 0].min())
        self._cache.truncate(0, self.reused_tokens)
        return self._cache if self.reused_tokens else None
