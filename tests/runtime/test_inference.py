"""The public API: what it takes, what it refuses before any work, and streams beside each other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dspark.exporter.export import export_bundle, prepare
from dspark.runtime import (
    BundleError,
    DSparkInference,
    NumericalError,
    ProviderError,
    RequestError,
    SamplingParams,
    SpeculationOptions,
)
from tests.support.golden_models import GOLDEN, PROMPTS, Arrays, ids, load, outcome, tampered

GoldenBundle = Callable[[str], Path]

SHORT = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def vanilla(golden_bundle: GoldenBundle) -> DSparkInference:
    return load(golden_bundle("dspark_vanilla"), 4)


@pytest.fixture(scope="module")
def wordless(tmp_path_factory: pytest.TempPathFactory) -> DSparkInference:
    """A model whose checkpoint had no tokenizer."""
    root = tmp_path_factory.mktemp("wordless")
    ignored = shutil.ignore_patterns("tokenizer*")
    target = shutil.copytree(GOLDEN / "qwen3_target", root / "target", ignore=ignored)
    export_bundle(prepare(target, GOLDEN / "dspark_vanilla", root / "bundle"))
    return load(root / "bundle")


# --- prompts ---


def test_prompts_of_every_kind(vanilla: DSparkInference) -> None:
    """Text, ids, numpy's ids: without a template all are the same prompt."""
    kinds = ["tead ", ids("tead "), tuple(ids("tead ")), np.array(ids("tead "))]
    first, *others = [outcome(completion) for completion in vanilla.generate(kinds, SHORT)]
    assert first[1] == "in the c"
    assert others == [first] * 3


def test_text_goes_through_the_chat_template_unless_raw(chat_bundle: GoldenBundle) -> None:
    inference = load(chat_bundle("dspark_vanilla"))
    asked, written = "what is a class", "u: what is a class\na: "
    expected = outcome(inference.generate([ids(written)], SHORT)[0])
    assert outcome(inference.generate([asked], SHORT)[0]) == expected
    assert outcome(inference.generate([[{"role": "user", "content": asked}]], SHORT)[0]) == expected
    assert outcome(inference.generate([written], SHORT, raw=True)[0]) == expected
    assert outcome(inference.generate([asked], SHORT, raw=True)[0]) != expected
    assert "".join(chunk.text for chunk in inference.stream(asked, SHORT)) == expected[1]
    assert inference.encode(asked) == ids(written)
    assert inference.encode(asked, raw=True) == ids(asked)


def test_a_model_without_a_tokenizer_speaks_ids(wordless: DSparkInference, vanilla: DSparkInference) -> None:
    expected = vanilla.generate([PROMPTS[0]], SHORT)[0]
    completion = wordless.generate([PROMPTS[0]], SHORT)[0]
    assert completion.text is None
    assert outcome(completion)[2:] == outcome(expected)[2:]
    assert completion.token_ids == expected.token_ids
    chunks = list(wordless.stream(PROMPTS[0], SHORT))
    assert {chunk.text for chunk in chunks} == {""}
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([104, 160], r"prompt_ids has 160, which is outside the vocabulary \(0 to 159\)"),
        ([-1], "prompt_ids has -1"),
        (7, "a prompt must be text, token ids or chat messages, not 7"),
        (None, "a prompt must be text, token ids or chat messages, not None"),
        ([{"role": "user", "content": "hello"}], "no chat template"),
        ([1.5], "no chat template"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: object, message: str, vanilla: DSparkInference) -> None:
    with pytest.raises(RequestError, match=message):
        vanilla.generate([prompt], SHORT)  # type: ignore[list-item]
    with pytest.raises(RequestError, match=message):
        vanilla.stream(prompt, SHORT)  # type: ignore[arg-type]
    assert vanilla.engine.idle


def test_a_text_instead_of_a_list_of_texts_is_refused(vanilla: DSparkInference) -> None:
    with pytest.raises(RequestError, match="prompts must be a list of prompts"):
        vanilla.generate("hello")


def test_what_needs_a_tokenizer_is_refused_without_one(wordless: DSparkInference) -> None:
    with pytest.raises(RequestError, match="stop strings need a tokenizer, and this bundle has none"):
        wordless.generate([PROMPTS[0]], SamplingParams(stop=("x",)))
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        with pytest.raises(RequestError, match="no tokenizer; give prompts as token ids"):
            wordless.generate([prompt])


def test_nothing_runs_if_one_prompt_is_refused(golden_bundle: GoldenBundle) -> None:
    calls = []

    def note(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        calls.append(graph)

    inference = tampered(golden_bundle("dspark_vanilla"), note)
    with pytest.raises(RequestError):
        inference.generate([PROMPTS[0], []], SHORT)
    assert calls == []
    assert inference.engine.idle
    assert inference.generate([]) == []


# --- the context's limit ---


@pytest.mark.parametrize("name", ["qwen3_target", "dspark_vanilla", "eagle3"])
def test_the_whole_context_can_be_used(name: str, golden_bundle: GoldenBundle) -> None:
    """Up to its last token; drafts reach beyond it, and what fits does not depend on speculation."""
    inference = load(golden_bundle(name))
    prompt = [token for prompt in PROMPTS for token in prompt] * 5
    for size in (480, 511):
        left = SamplingParams(max_new_tokens=512 - size)
        completion = inference.generate([prompt[:size]], left)[0]
        assert (len(completion.token_ids), completion.finish_reason) == (512 - size, "length")
        plain = load(golden_bundle(name), options=SpeculationOptions("off")).generate([prompt[:size]], left)[0]
        assert completion.token_ids == plain.token_ids
        beyond = left.model_copy(update={"max_new_tokens": 513 - size})
        refusal = f"the prompt's {size} tokens and max_new_tokens {513 - size} make 513; the limit is 512"
        with pytest.raises(RequestError, match=refusal):
            inference.generate([prompt[:size]], beyond)


def test_a_shorter_limit_can_be_set(golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle("dspark_vanilla"), max_sequence_length=20)
    assert inference.context_length == 20
    assert len(inference.generate([ids("is a string ")], SHORT)[0].token_ids) == 8
    with pytest.raises(RequestError, match="the prompt's 13 tokens and max_new_tokens 8 make 21; the limit is 20"):
        inference.generate([ids("is a string a")], SHORT)


# --- settings ---


def test_settings_of_all_or_of_each(vanilla: DSparkInference) -> None:
    one, two = vanilla.generate(PROMPTS[:2], SHORT)
    assert [len(one.token_ids), len(two.token_ids)] == [8, 8]
    one, two = vanilla.generate(PROMPTS[:2], [SHORT, SamplingParams(max_new_tokens=3)])
    assert [len(one.token_ids), len(two.token_ids)] == [8, 3]
    assert len(vanilla.generate(PROMPTS[:1])[0].token_ids) == 128
    with pytest.raises(RequestError, match="2 prompts but 1 sampling options"):
        vanilla.generate(PROMPTS[:2], [SHORT])


def test_unseeded_requests_differ(vanilla: DSparkInference) -> None:
    hot = SamplingParams(max_new_tokens=20, temperature=2.0)
    assert len({tuple(completion.token_ids) for completion in vanilla.generate([PROMPTS[0]] * 8, hot)}) == 8


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": 1.5}, {"beam_width": 4}])
def test_settings_that_do_not_exist_cannot_be_made(options: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)  # type: ignore[arg-type]


# --- loading ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be from 1 to"),
        ({"threads": 0}, "threads is 0; it must be from 1 to"),
        ({"max_sequence_length": 1}, "max_sequence_length is 1; this bundle allows 2 to 512"),
        ({"max_sequence_length": 513}, "max_sequence_length is 513; this bundle allows 2 to 512"),
        (
            {"options": SpeculationOptions("fixed", max_draft_tokens=0)},
            "max_draft_tokens is 0; this drafter allows 1 to 5",
        ),
        (
            {"options": SpeculationOptions("fixed", max_draft_tokens=6)},
            "max_draft_tokens is 6; this drafter allows 1 to 5",
        ),
        ({"options": SpeculationOptions(confidence_threshold=1.5)}, "confidence_threshold is 1.5; it is a probability"),
        ({"options": SpeculationOptions("fixed", confidence_threshold=0.5)}, "belongs to scheduler 'threshold'"),
        ({"options": SpeculationOptions("off", confidence_threshold=0.5)}, "belongs to scheduler 'threshold'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], message: str, golden_bundle: GoldenBundle) -> None:
    with pytest.raises(RequestError, match=message):
        DSparkInference.load(golden_bundle("dspark_vanilla"), **arguments)  # type: ignore[arg-type]


def test_options_that_a_bundle_cannot_follow(golden_bundle: GoldenBundle) -> None:
    for scheduler in ("fixed", "threshold"):
        with pytest.raises(RequestError, match=f"scheduler '{scheduler}' needs a drafter, and this bundle has none"):
            load(golden_bundle("qwen3_target"), options=SpeculationOptions(scheduler))  # type: ignore[arg-type]
    for name in ("dflash", "eagle3"):
        with pytest.raises(RequestError, match="needs a confidence head, and this bundle has none; leave the"):
            load(golden_bundle(name), options=SpeculationOptions("threshold"))


def test_what_a_provider_cannot_run_is_refused(golden_bundle: GoldenBundle) -> None:
    with pytest.raises(ProviderError, match="Did you mean 'cpu'"):
        load(golden_bundle("dspark_vanilla"), provider="cpuu")
    with pytest.raises(BundleError, match="no bundle here"):
        load(golden_bundle("dspark_vanilla").parent)


@pytest.mark.parametrize(
    ("options", "drafted"),
    [
        (None, {5}),
        (SpeculationOptions("fixed", max_draft_tokens=2), {2}),
        (SpeculationOptions("threshold"), {0, 1, 2, 3, 4, 5}),
        (SpeculationOptions("threshold", 3, 0.3), {0, 1, 2, 3}),
        (SpeculationOptions(confidence_threshold=0.0), {5}),
        (SpeculationOptions(confidence_threshold=1.0), {0}),
        (SpeculationOptions("off"), {0}),
    ],
)
def test_the_scheduler_decides_how_much_is_verified(
    options: SpeculationOptions | None, drafted: set[int], golden_bundle: GoldenBundle
) -> None:
    inference = load(golden_bundle("dspark_vanilla"), 3, options)
    completions = inference.generate(PROMPTS, SamplingParams(max_new_tokens=64))
    lengths = {length for completion in completions for length in completion.stats.draft_lengths[:-1]}
    assert lengths == drafted


# --- streams ---


def test_streams_beside_each_other_lose_nothing(vanilla: DSparkInference) -> None:
    """Each step of one moves all of them on, some to their end before anyone asks."""
    settings = [SamplingParams(max_new_tokens=count, temperature=0.9, seed=count) for count in (40, 3, 25, 10, 1)]
    expected = [outcome(vanilla.generate([prompt], each)[0]) for prompt, each in zip(PROMPTS, settings, strict=True)]
    streams = [vanilla.stream(prompt, each) for prompt, each in zip(PROMPTS, settings, strict=True)]
    chunks = [[next(stream)] for stream in streams]  # more streams than slots
    for stream, seen in zip(streams, chunks, strict=True):
        seen.extend(stream)
        assert all(chunk.text or chunk.token_ids for chunk in seen)
    assert [[token for chunk in seen for token in chunk.token_ids] for seen in chunks] == [each[0] for each in expected]
    assert ["".join(chunk.text for chunk in seen) for seen in chunks] == [each[1] for each in expected]
    assert vanilla.engine.idle


def test_generate_does_not_run_open_streams_to_their_end(vanilla: DSparkInference) -> None:
    long = SamplingParams(max_new_tokens=100)
    expected = vanilla.generate([PROMPTS[0]], long)[0]
    stream = vanilla.stream(PROMPTS[0], long)
    tokens = list(next(stream).token_ids)
    assert outcome(vanilla.generate([PROMPTS[1]], SHORT)[0])[1] == "in the c"
    tokens += next(stream).token_ids
    assert 0 < len(tokens) < 90
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == expected.token_ids
    assert vanilla.engine.idle


def test_a_stream_that_nobody_reads_costs_nothing(vanilla: DSparkInference) -> None:
    unread = vanilla.stream(PROMPTS[0], SHORT)
    assert vanilla.engine.idle
    next(vanilla.stream(PROMPTS[0], SHORT))  # dropped at once
    assert vanilla.engine.idle
    assert len([token for chunk in unread for token in chunk.token_ids]) == 8


def test_a_stream_ends_with_the_error(golden_bundle: GoldenBundle) -> None:
    def poison(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "target":
            outputs["logits"][inputs["position_ids"][inputs["logits_index"]] == len(PROMPTS[1]) + 7] = np.nan

    inference = tampered(golden_bundle("dspark_vanilla"), poison)
    tokens: list[int] = []
    stream = inference.stream(PROMPTS[1], SamplingParams(max_new_tokens=20))
    with pytest.raises(NumericalError, match="not a finite number"):
        tokens.extend(token for chunk in stream for token in chunk.token_ids)
    assert inference.engine.idle
    completion = inference.generate([PROMPTS[1]], SamplingParams(max_new_tokens=20))[0]
    assert completion.finish_reason == "error"
    assert completion.text == "in the class"[: len(completion.token_ids)]


def test_statistics_are_plausible(vanilla: DSparkInference) -> None:
    completion = vanilla.generate([PROMPTS[0]], SamplingParams(max_new_tokens=64))[0]
    stats = completion.stats
    golden = json.loads((GOLDEN / "dspark_vanilla" / "golden.json").read_text())["greedy"][0]
    assert stats.accepted_lengths[:-1] == golden["accepted_draft_lengths"][:-1]  # the last one is cut by the limit
    assert stats.acceptance_length == pytest.approx(1 + np.mean(stats.accepted_lengths))
    assert stats.time_to_first_token is not None
    assert 0 < stats.time_to_first_token < stats.seconds < 60
    assert stats.tokens_per_second == pytest.approx(64 / stats.seconds)
