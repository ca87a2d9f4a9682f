"""The public API: load a bundle, generate, stream, converse."""

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, get_args

import numpy as np

from dspark.providers import Selection, Session
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.calibration import Calibration, read_calibration
from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.cache.allocation import fixed_capacity
from dspark.runtime.cache.key_value_cache import KeyValueCache, make_cache
from dspark.runtime.costs.table import CostTable
from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.engine import Engine, Speculation
from dspark.runtime.engine.request import Completion, Priority, Request
from dspark.runtime.engine.settings import EngineSettings
from dspark.runtime.errors import RequestError
from dspark.runtime.loading.costs import find_costs
from dspark.runtime.loading.serving_profile import find_profile
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.drafters import make_drafter
from dspark.runtime.model.target import Target
from dspark.runtime.scheduling.options import SpeculationOptions
from dspark.runtime.text.stream import TextStream
from dspark.runtime.text.tokenizer import TextProcessor

if TYPE_CHECKING:
    from typing_extensions import TypeIs

from dspark.runtime.loading.sessions import open_sessions

__all__ = ["Chunk", "DSparkInference", "Prompt", "check_batch_size", "longest_text"]

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages."""

MOST_REQUESTS = 1024
BATCH_SIZE = 8
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """Output that has just been decided.

    Attributes:
        text: New text, possibly empty (a character or a stop string may be incomplete).
        token_ids: New ids.
    """

    text: str
    token_ids: list[int]


class DSparkInference:
    """A loaded bundle.

    Make one with ``load``, which also reads the bundle's calibration, if it has one, and what steps cost.

    Prompts given as text go through the chat template, if the bundle has one, unless ``raw``.

    Attributes:
        bundle: The bundle.
        clock: Where the time of its generations goes, by phase.
        context_length: Longest text in tokens, prompt and output together.
    """

    def __init__(
        self,
        bundle: Bundle,
        sessions: Mapping[str, Session],
        options: SpeculationOptions,
        batch_size: int,
        context_length: int,
        calibration: Calibration | None = None,
        costs: CostTable | None = None,
        settings: EngineSettings | None = None,
    ) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        self.clock = PhaseClock()
        self.context_length = context_length
        self._settings = settings or EngineSettings()
        self.text = _text_processor(bundle)
        self._stop_token_ids = frozenset(manifest.target.stop_token_ids)
        plan = options.resolve(manifest)
        cache = make_cache(manifest, sessions, batch_size)
        target = Target(sessions["target"], manifest, cache, self.clock)
        speculation = None
        if plan is not None and manifest.drafter is not None:
            length = plan.draft_length
            temperatures = np.ones(length) if calibration is None else calibration.temperatures
            speculation = Speculation(
                drafter=make_drafter(bundle, sessions, cache, self.clock),
                scheduler=plan.make_scheduler(costs),
                max_draft_tokens=plan.max_draft_tokens,
                draft_length=length,
                confidence_temperatures=np.asarray(temperatures, np.float32),
            )
        most = batch_size if manifest.shapes is None else min(batch_size, manifest.shapes.batch)
        self.engine = Engine(target, cache, speculation, most, self.clock, self._settings)

    @classmethod
    def load(
        cls,
        bundle: Path | str,
        *,
        provider: str | Sequence[str] = "cpu",
        allow_fallback: bool = False,
        threads: int | None = None,
        batch_size: int | None = None,
        options: SpeculationOptions | None = None,
        max_sequence_length: int | None = None,
        profile: Path | str | None = None,
        shared: bool = True,
        check_hashes: bool | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> "DSparkInference":
        """Loads a bundle.

        If the scheduler has to know what steps cost and nobody measured it on this device, that is measured now, in
        some seconds, and kept in the bundle.

        Args:
            bundle: Its folder.
            provider: What runs its graphs, as after ``--provider``: ``NAME[:key=value,…]`` for all of them or
                ``GRAPH=NAME[:…]`` for one. Of several for the same graph the first that can run it does.
            allow_fallback: Whether nodes that a device cannot run may run on the host's CPU.
            threads: Host threads; by default one a core.
            batch_size: Requests that run at once, at most as many as a bundle of fixed shapes has; by default the
                profile's number, or 8, as far as the bundle allows.
            options: How to speculate; what they leave open the profile decides.
            max_sequence_length: Longest text in tokens, to bound the cache; by default the profile's or the model's own
                limit.
            profile: A serving profile: the name of one that comes with the package, or a YAML file.
            shared: Whether requests may come from other threads than the one that computes; if not, an idle engine does
                not wait for them.
            check_hashes: See ``Bundle.open``.
            notify: Told in a line when steps have to be measured.

        Raises:
            BundleError: The bundle or its calibration is missing files, damaged or of another version.
            ProviderError: The provider is unknown, not installed, or cannot run the bundle.
            RequestError: An option does not fit the bundle, or the profile is refused.
        """
        opened = Bundle.open(bundle, check_hashes=False)
        manifest, chosen = opened.manifest, find_profile(profile)
        options = chosen.options(manifest, options or SpeculationOptions())
        most = MOST_REQUESTS if manifest.shapes is None else manifest.shapes.batch
        batch_size = min(chosen.batch_size or BATCH_SIZE, most) if batch_size is None else batch_size
        check_batch_size(batch_size, most=most)
        chosen.context_length(manifest.context_length, max_sequence_length)  # before large graphs are loaded
        plan = options.resolve(manifest)
        names = ["target"] if plan is None else list(manifest.precision)
        calibration = read_calibration(opened)
        selection = Selection.parse(provider, allow_fallback=allow_fallback)
        sessions = open_sessions(opened, selection, names, threads, check_hashes)
        limit = chosen.context_length(longest_text(manifest, sessions), max_sequence_length)
        settings = chosen.settings if shared else chosen.settings.alone
        costs = find_costs(plan, opened, selection, threads, batch_size, lambda: sessions, notify)
        return cls(opened, sessions, options, batch_size, limit, calibration, costs, settings)

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
        """Checks a prompt and makes a request of it, to be submitted to the engine.

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
        params = params or SamplingParams()
        prompt_ids = self.encode(prompt, raw=raw)
        size = self.bundle.manifest.target.vocabulary_size
        if not prompt_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        outside = [token for token in prompt_ids if not 0 <= token < size]
        if outside:
            raise RequestError(f"prompt_ids has {outside[0]}, which is outside the vocabulary (0 to {size - 1})")
        total = len(prompt_ids) + params.max_new_tokens
        if total > self.context_length:
            raise RequestError(
                f"the prompt's {len(prompt_ids)} tokens and max_new_tokens {params.max_new_tokens} make {total}; "
                f"the limit is {self.context_length}"
            )
        room = self._settings.cache_tokens
        if room is not None and total > room:
            raise RequestError(
                f"the prompt's {len(prompt_ids)} tokens and max_new_tokens {params.max_new_tokens} make {total}; "
                f"the cache has room for {room} (max_cache_tokens)"
            )
        if params.stop and self.text is None:
            raise RequestError("stop strings need a tokenizer, and this bundle has none")
        sampler = Sampler(params, prompt_ids, size, self._stop_token_ids)
        stream = TextStream(self.text, params.stop) if self.text is not None else None
        return Request(
            prompt_ids, sampler, self._stop_token_ids, stream, prefix=prefix, keep_cache=keep_cache, priority=priority
        )

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: Text, chat messages, or token ids, which are taken as they are.
            raw: Whether text is taken as it is, without the chat template.

        Raises:
            RequestError: The prompt is malformed, or the bundle lacks the tokenizer or template that it needs.
        """
        if not isinstance(prompt, Iterable):
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

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        priority: Priority = "interactive",
    ) -> list[Completion]:
        """Generates for several prompts at once.

        Args:
            prompts: The prompts.
            params: Sampling options of all, or of each.
            raw: Whether text is taken as it is, without the chat template.
            priority: See ``Request``.

        Returns:
            The completions, in the order of the prompts.

        Raises:
            RequestError: A prompt or its options are refused; nothing has been computed then.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts must be a list of prompts; this is a single text")
        if not isinstance(params, Sequence):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling options")
        requests = [
            self.request(prompt, each, raw=raw, priority=priority) for prompt, each in zip(prompts, params, strict=True)
        ]
        self.run(requests)
        return [request.completion() for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        priority: Priority = "interactive",
    ) -> Generator[Chunk, None, None]:
        """Generates for one prompt and yields output as it is decided; closing the iterator frees its slot.

        Several streams may be open at once, in one thread or in several; each step of one moves all of them on.

        Args:
            prompt: The prompt.
            params: Sampling options; greedy by default.
            raw: Whether text is taken as it is, without the chat template.
            priority: See ``Request``.

        Raises:
            RequestError: As ``request``.
            NumericalError: The model returned values that are not finite.
        """
        return self.follow(self.request(prompt, params, raw=raw, priority=priority))

    def follow(self, request: Request) -> Generator[Chunk, None, None]:
        """Submits a request and yields its output as it is decided; closing the iterator cancels it.

        If someone else cancels it (``engine.cancel``, from any thread), the output just ends.

        Raises:
            NumericalError: The model returned values that are not finite.
        """
        self.engine.submit(request)
        try:
            seen = 0
            while True:
                ended = request.finish_reason is not None  # before looking: another thread may add the last tokens now
                chunk = Chunk(request.take_text(), request.output_ids[seen:])
                seen += len(chunk.token_ids)
                if chunk.text or chunk.token_ids:
                    yield chunk  # meanwhile other streams may move this request on, even to its end
                elif ended:
                    break
                else:
                    self.engine.step()
        finally:
            self.engine.cancel(request)
        if request.failure is not None:
            raise request.failure

    def run(self, requests: Sequence[Request]) -> None:
        """Runs requests to their end; if that is broken off, none of them stays behind."""
        for request in requests:
            self.engine.submit(request)
        try:
            for request in requests:
                while request.finish_reason is None:
                    self.engine.step()
        finally:
            for request in requests:
                self.engine.cancel(request)


def _are_ids(prompt: Prompt) -> "TypeIs[Sequence[int]]":
    return not isinstance(prompt, str) and all(
        isinstance(item, Integral) and not isinstance(item, bool) for item in prompt
    )


def _are_messages(prompt: str | Sequence[Mapping[str, str]]) -> "TypeIs[Sequence[Mapping[str, str]]]":
    return not isinstance(prompt, str)


def check_batch_size(batch_size: int, name: str = "batch_size", most: int = MOST_REQUESTS) -> None:
    """Refuses what is no number of requests that can run at once.

    Args:
        batch_size: The number.
        name: What users call it.
        most: What a bundle allows.

    Raises:
        RequestError: It is too small or too large.
    """
    if not 1 <= batch_size <= most:
        shapes = "" if most == MOST_REQUESTS else ", which the bundle's fixed shapes are for"
        raise RequestError(f"{name} is {batch_size}; it must be from 1 to {most}{shapes}")


def longest_text(manifest: Manifest, sessions: Mapping[str, Session]) -> int:
    """Tokens of the longest text that a bundle's graphs allow, prompt and output together."""
    limit, capacity = manifest.context_length, fixed_capacity(sessions)
    drafted = manifest.drafter.draft_length if manifest.drafter else 0
    return limit if capacity is None else min(limit, capacity - drafted)


def _text_processor(bundle: Bundle) -> TextProcessor | None:
    text = bundle.manifest.text
    if text.tokenizer is None:
        return None
    template = None if text.chat_template is None else bundle.text(text.chat_template)
    return TextProcessor(bundle.text(text.tokenizer), template, text.special_tokens)
