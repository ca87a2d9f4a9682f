"""``dspark-run chat``: a conversation in the terminal."""

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.runtime.commands.checks import check_options
from dspark.runtime.commands.loading import load
from dspark.runtime.commands.options import (
    PROMPTS,
    AllowFallback,
    BundleArgument,
    ConfidenceThreshold,
    FrequencyPenalty,
    MaxDraftTokens,
    MaxNewTokens,
    MinP,
    PresencePenalty,
    Profile,
    Providers,
    RepetitionPenalty,
    Scheduler,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
)
from dspark.runtime.commands.terminal import print_error
from dspark.runtime.errors import RequestError

if TYPE_CHECKING:
    from dspark.runtime.conversation import Conversation
    from dspark.runtime.decoding.sampling_params import SamplingParams

__all__ = ["chat"]


def chat(
    bundle: BundleArgument,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.", rich_help_panel=PROMPTS)] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = None,
    scheduler: Scheduler = None,
    max_draft_tokens: MaxDraftTokens = None,
    confidence_threshold: ConfidenceThreshold = None,
    profile: Profile = None,
    threads: Threads = None,
    provider: Providers = None,
    allow_fallback: AllowFallback = False,
) -> None:
    """Holds a conversation that keeps its cache from turn to turn.

    Ctrl-C breaks an answer off, /exit or Ctrl-D ends the conversation.
    """
    from dspark.runtime.bundle.bundle import Bundle
    from dspark.runtime.conversation import Conversation
    from dspark.runtime.decoding.sampling_params import SamplingParams
    from dspark.runtime.scheduling.options import SpeculationOptions

    given: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    params = SamplingParams.parse(SamplingParams(), given)
    options = SpeculationOptions(scheduler, max_draft_tokens, confidence_threshold)
    text = Bundle.open(bundle, check_hashes=False).manifest.text
    if text.tokenizer is None or text.chat_template is None:
        raise RequestError(f"{bundle}: has no chat template, which a conversation needs; use generate")
    check_options(bundle, params, [], options, profile)
    inference = load(
        bundle,
        options,
        batch_size=1,
        threads=threads,
        profile=profile,
        provider=provider,
        allow_fallback=allow_fallback,
    )
    conversation = Conversation(inference, system)
    while (said := _read_message()) is not None:
        if said:
            _answer(conversation, said, params)


def _read_message() -> str | None:
    """The user's next message; None ends the conversation.

    Raises:
        RequestError: Standard input is no terminal that can be read, or no text.
    """
    try:
        text = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    except (RuntimeError, UnicodeDecodeError) as error:
        raise RequestError(f"standard input cannot be read: {error}") from error
    return None if text == "/exit" else text


def _answer(conversation: "Conversation", text: str, params: "SamplingParams") -> None:
    try:
        with closing(conversation.reply(text, params)) as chunks:
            for chunk in chunks:
                print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    except RequestError as error:
        print_error(str(error))
    print()
