"""The public API: load a bundle, generate, stream."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dspark.runtime.arguments import check_argument
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.costs.table import CostTable
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.engine import Engine
from dspark.runtime.engine.request import Completion, Priority, Request
from dspark.runtime.errors import RequestError
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.loading.serving_profile import find_profile
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.prompts import Prompt, PromptReader
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["Chunk", "DSparkInference", "Prompt"]

AS_IT_IS = ServingOptions()


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
    """A bundle that generates; ``load`` makes one, and ``with`` or ``close`` frees its memory.

    Prompts given as text go through the chat template, if the bundle has one, unless ``raw``.

    Args:
        loaded: The bundle and its graphs; several may share them.
        use: How the bundle is used.
        costs: What steps cost, if the scheduler has to know.

    Attributes:
        bundle: The bundle.
        clock: Where the time of its generations goes, by phase.
        context_length: Longest text in tokens, prompt and output together.
        text: Turns text into ids and back; None if the bundle has no tokenizer.

    Raises:
        RequestError: The graphs do not allow the use, or the scheduler lacks the costs.
    """

    def __init__(self, loaded: LoadedModel, use: ServingOptions = AS_IT_IS, costs: CostTable | None = None) -> None:
        plan = loaded.plan(use)
        self.bundle = loaded.bundle
        self.clock = PhaseClock()
        self.context_length = plan.context_length
        self._prompts = PromptReader(loaded.bundle, plan.context_length, plan.settings.cache_tokens)
        self.text = self._prompts.text
        self._engine: Engine | None = loaded.engine(plan, self.clock, costs)

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

        If the scheduler has to know what steps cost, and that was never measured on this device, it is measured now, in
        some seconds, and kept in the bundle.

        Args:
            bundle: Its folder.
            provider: What runs its graphs, as after ``--provider``: ``NAME[:key=value,…]`` for all of them or
                ``GRAPH=NAME[:…]`` for one. Of several for the same graph the first that can run it does.
            allow_fallback: Whether nodes that a device cannot run may run on the host's CPU.
            threads: Host threads; by default one per core.
            batch_size: Requests that run at once, at most as many as the bundle's graphs take; by default the
                profile's number, or 8, as far as the bundle allows.
            options: How to speculate; the profile decides what they leave open.
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
        check_argument("options", options, (SpeculationOptions, type(None)), "SpeculationOptions(…)")
        check_argument("notify", notify, Callable, "a function of one text")  # type: ignore[arg-type]
        for name, value in (("allow_fallback", allow_fallback), ("shared", shared)):
            check_argument(name, value, bool, "True or False")
        check_argument("check_hashes", check_hashes, (bool, type(None)), "True, False or None")
        host = HostOptions.parse(provider, allow_fallback=allow_fallback, threads=threads)
        speculation = options or SpeculationOptions()
        use = ServingOptions(speculation, batch_size, max_sequence_length, find_profile(profile), shared)
        loaded = LoadedModel.open(Bundle.open(bundle, check_hashes=False), host, [use], check_hashes)
        return cls(loaded, use, loaded.costs([loaded.plan(use)], notify))

    @property
    def engine(self) -> Engine:
        """Runs the requests; several threads may use it.

        Raises:
            RequestError: The model was closed.
        """
        if self._engine is None:
            raise RequestError("the model was closed; load it again")
        return self._engine

    def close(self) -> None:
        """Cancels all requests and lets go of graphs and caches; closing again does nothing."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt, see ``PromptReader.encode``."""
        return self._prompts.encode(prompt, raw=raw)

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
        """Checks a prompt and makes a request of it, see ``PromptReader.request``; ``follow`` or ``run`` submits it."""
        return self._prompts.request(prompt, params, raw=raw, priority=priority, prefix=prefix, keep_cache=keep_cache)

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
        check_argument("prompts", prompts, Sequence, "a list of prompts")
        check_argument("params", params, (SamplingParams, Sequence, type(None)), "SamplingParams(…), or one per prompt")
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
            ProviderError: A graph failed.
        """
        return self.follow(self.request(prompt, params, raw=raw, priority=priority))

    def follow(self, request: Request) -> Generator[Chunk, None, None]:
        """Submits a request and yields its output as it is decided; closing the iterator cancels it.

        If someone else cancels it (``engine.cancel``, from any thread), the output just ends.

        Raises:
            NumericalError: The model returned values that are not finite.
            ProviderError: A graph failed.
        """
        engine = self.engine
        engine.submit(request)
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
                    engine.step()
        finally:
            engine.cancel(request)
        if request.failure is not None:
            raise request.failure

    def run(self, requests: Sequence[Request]) -> None:
        """Runs requests to their end; if that is broken off, none of them stays behind."""
        engine = self.engine
        check_argument("requests", requests, Sequence, "a list of requests")
        for request in requests:
            engine.submit(request)
        try:
            for request in requests:
                while request.finish_reason is None:
                    engine.step()
        finally:
            for request in requests:
                engine.cancel(request)
