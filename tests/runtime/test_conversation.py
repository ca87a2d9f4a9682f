"""Turns that go on from the cache of the turns before."""

from collections.abc import Callable
from contextlib import closing
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from dspark.runtime import Conversation, NumericalError, RequestError, SamplingParams
from tests.support.golden_models import Arrays, ids, load, tampered

ChatBundle = Callable[[str], Path]

MODELS = ["qwen3_target", "dspark_vanilla", "dflash", "eagle3"]
GREEDY = SamplingParams(max_new_tokens=30)
HOT = SamplingParams(max_new_tokens=30, temperature=0.8, seed=4)


def answer(conversation: Conversation, text: str, params: SamplingParams = GREEDY, chunks: int = 1000) -> str:
    """The answer, or its beginning if it is broken off after some chunks."""
    with closing(conversation.reply(text, params)) as reply:
        return "".join(chunk.text for chunk in islice(reply, chunks))


def fresh_answer(bundle: Path, conversation: Conversation, text: str, params: SamplingParams = GREEDY) -> str | None:
    """The answer of a model that knows only the messages."""
    messages = [*conversation.messages, {"role": "user", "content": text}]
    return loaded(bundle).generate([messages], params)[0].text


loaded = cache(load)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_every_turn_equals_a_fresh_run(name: str, params: SamplingParams, chat_bundle: ChatBundle) -> None:
    bundle = chat_bundle(name)
    conversation = Conversation(load(bundle), system="Be brief.")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    for turn, text in enumerate(["what is a class", "and a string", "x", "the end of the file"]):
        expected = fresh_answer(bundle, conversation, text, params)
        known = len("".join(f"{message['role'][0]}: {message['content']}\n" for message in conversation.messages))
        assert answer(conversation, text, params) == expected
        assert conversation.messages[-2:] == [
            {"role": "user", "content": text},
            {"role": "assistant", "content": expected},
        ]
        if turn == 0:
            assert conversation.reused_tokens == 0
        else:
            assert known - 10 < conversation.reused_tokens < known


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_a_turn_from_the_cache_drafts_as_a_cold_one(name: str, chat_bundle: ChatBundle) -> None:
    """The drafter's context comes from the cache too: nothing but the prefill is shorter."""
    sizes: list[int] = []
    context: dict[str, np.ndarray] = {}

    def note(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "target":
            sizes.append(len(inputs["input_ids"]))
        if graph == "drafter":
            cached = {name: rows for name, rows in inputs.items() if name.startswith("context.")}
            bias = inputs["context_bias"] if "context_bias" in inputs else inputs["attention_bias"]
            for name, rows in cached.items():
                seen = bias[0, 0, 0, 0, : rows.shape[2]] == 0  # behind them lies what rejected tokens left
                context[name] = rows[:, :, seen].copy()

    inference = tampered(chat_bundle(name), note)
    conversation = Conversation(inference)
    long = answer(Conversation(inference), "what is a class")
    stop = long[8:25]  # the cache knows this text beyond the answer, some rounds of it
    for text, params in [
        ("what is a class", GREEDY.model_copy(update={"stop": (stop,)})),
        ("and a string", GREEDY),
        ("a very much longer message", GREEDY),
    ]:
        messages = [*conversation.messages, {"role": "user", "content": text}]
        sizes.clear()
        answer(conversation, text, params)
        warm, warm_context = sizes.copy(), context.copy()
        sizes.clear()
        inference.generate([messages], params)
        assert warm[0] == sizes[0] - conversation.reused_tokens
        assert warm[1:] == sizes[1:]  # each round verified as many tokens: as many were accepted
        assert len(warm) < GREEDY.max_new_tokens
        for layer, rows in context.items():
            assert rows.any()
            assert np.abs(rows - warm_context[layer]).max() < 1e-4
    assert conversation.messages[1]["content"] == long[: long.index(stop)]


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_that_is_broken_off_counts_as_far_as_it_got(name: str, chat_bundle: ChatBundle) -> None:
    bundle = chat_bundle(name)
    inference = load(bundle)
    for chunks in (1, 2, 4):
        conversation = Conversation(inference)
        answer(conversation, "what is a class")
        part = answer(conversation, "and a string", chunks=chunks)
        assert conversation.messages[-1] == {"role": "assistant", "content": part}
        assert 0 < len(part) < 30
        assert inference.engine.idle
        expected = fresh_answer(bundle, conversation, "go on")
        assert answer(conversation, "go on") == expected
        assert conversation.reused_tokens > 0


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_a_refused_message_does_not_count(name: str, chat_bundle: ChatBundle) -> None:
    bundle = chat_bundle(name)
    conversation = Conversation(load(bundle))
    answer(conversation, "what is a class")
    messages = list(conversation.messages)
    with pytest.raises(RequestError, match="as you wish"):
        answer(conversation, "refuse me")
    with pytest.raises(RequestError, match=r"max_new_tokens 30 make \d+; the limit is 512"):
        answer(conversation, "x" * 460)
    with pytest.raises(RequestError, match="logit_bias"):
        answer(conversation, "y", SamplingParams(logit_bias={1000: 1.0}))
    assert conversation.messages == messages
    expected = fresh_answer(bundle, conversation, "and a string")
    assert answer(conversation, "and a string") == expected
    assert conversation.reused_tokens > 0


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_answers_that_end_early(name: str, chat_bundle: ChatBundle) -> None:
    """After one token nothing has been drafted; after a stop string the cache knows more than the text."""
    bundle = chat_bundle(name)
    for params in (SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=30, stop=(" ",))):
        conversation = Conversation(load(bundle))
        for text in ("what is a class", "and a string", "go on"):
            expected = fresh_answer(bundle, conversation, text, params)
            assert answer(conversation, text, params) == expected
        expected = fresh_answer(bundle, conversation, "more")
        assert answer(conversation, "more") == expected


def test_two_conversations_share_a_model(chat_bundle: ChatBundle) -> None:
    bundle = chat_bundle("eagle3")
    inference = load(bundle)
    one, other = Conversation(inference), Conversation(inference, system="Other.")
    for text in ("what is a class", "and a string"):
        expected = [fresh_answer(bundle, conversation, text) for conversation in (one, other)]
        with closing(one.reply(text, GREEDY)) as first, closing(other.reply(text, GREEDY)) as second:
            begun = next(first).text
            answers = [begun + "".join(chunk.text for chunk in first), "".join(chunk.text for chunk in second)]
        assert answers == expected


def test_the_conversation_ends_with_the_context(chat_bundle: ChatBundle) -> None:
    conversation = Conversation(load(chat_bundle("dspark_vanilla"), max_sequence_length=100))
    answer(conversation, "again")
    answer(conversation, "again")
    with pytest.raises(RequestError, match="the prompt's 98 tokens and max_new_tokens 30 make 128; the limit is 100"):
        answer(conversation, "again")
    assert len(conversation.messages) == 4


def test_after_an_error_the_next_turn_is_right(chat_bundle: ChatBundle) -> None:
    poisoned = False

    def poison(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "target" and poisoned:
            outputs["logits"][:] = np.nan

    bundle = chat_bundle("dspark_vanilla")
    conversation = Conversation(tampered(bundle, poison))
    answer(conversation, "what is a class")
    poisoned = True
    with pytest.raises(NumericalError):
        answer(conversation, "and a string")
    poisoned = False
    expected = fresh_answer(bundle, conversation, "go on")
    assert answer(conversation, "go on") == expected


def test_a_bundle_without_a_template_refuses(golden_bundle: ChatBundle) -> None:
    inference = load(golden_bundle("qwen3_target"))
    with pytest.raises(RequestError, match="chat template"):
        answer(Conversation(inference), "hello")
    assert inference.generate([ids("the ")], GREEDY)[0].finish_reason == "length"
