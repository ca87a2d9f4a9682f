"""Where an output ends, and that nothing after its end is emitted or counted."""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dspark.exporter.export import export_bundle, prepare
from dspark.providers import Session
from dspark.runtime import Bundle, Completion, DSparkInference, RequestError, SamplingParams, SpeculationOptions
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.loading.sessions import open_sessions
from tests.support.golden_models import DRAFTERS, GOLDEN, PROMPTS, load, outcome

GoldenBundle = Callable[[str], Path]

DRAFT_LENGTH = 5
PARAMS = [
    SamplingParams(max_new_tokens=48),
    *(SamplingParams(max_new_tokens=48, temperature=0.7, seed=seed) for seed in range(20)),
]


@dataclass
class Model:
    """A golden bundle with its sessions, for models that differ in their stop tokens."""

    bundle: Bundle
    sessions: dict[str, Session]

    @classmethod
    def open(cls, path: Path) -> "Model":
        bundle = Bundle.open(path)
        return cls(bundle, open_sessions(bundle, HostOptions(threads=1), list(bundle.manifest.precision)))

    def stopping_at(self, *tokens: int) -> DSparkInference:
        target = self.bundle.manifest.target.model_copy(update={"stop_token_ids": tokens})
        bundle = Bundle(self.bundle.path, self.bundle.manifest.model_copy(update={"target": target}))
        return DSparkInference(LoadedModel(bundle, self.sessions), ServingOptions(SpeculationOptions("fixed"), 1))


def rounds_of(completion: Completion) -> list[tuple[int, int]]:
    """Index of each round's first token in the output, and the draft tokens accepted."""
    first, rounds = 1, []
    for accepted in completion.stats.accepted_lengths:
        rounds.append((first, accepted))
        first += accepted + 1
    return rounds


def ends_by_slot(completion: Completion) -> dict[int, list[int]]:
    """Slot of a block → places in the output of tokens that were there; the last slot is a full block's bonus."""
    ends = defaultdict(list)
    for first, accepted in rounds_of(completion)[:-1]:
        for slot in range(accepted + (accepted in (0, DRAFT_LENGTH))):
            ends[slot].append(first + slot)
    return ends


def assert_cut(completion: Completion, whole: Completion, count: int) -> None:
    """A completion is the first ``count`` tokens of another, and its statistics know of no others."""
    assert len(completion.token_ids) == count
    assert completion.prompt_tokens == whole.prompt_tokens
    stats = completion.stats
    undrafted = stats.draft_lengths[-1:] == [0]  # the last token that is allowed; it takes other random numbers then
    assert completion.token_ids[: count - undrafted] == whole.token_ids[: count - undrafted]
    expected = [min(accepted, count - first) for first, accepted in rounds_of(whole) if first < count]
    assert stats.rounds == len(stats.draft_lengths) == len(stats.accepted_lengths) == len(expected)
    if undrafted:
        expected[-1] = 0
    assert stats.accepted_lengths == expected
    emitted = 1 + sum(expected) + len(expected)  # of the prefill, drafted, and the target's own
    assert len(completion.token_ids) in (emitted, emitted - 1)  # the end can come before the target's own
    assert stats.acceptance_length == (1 + sum(expected) / len(expected) if expected else None)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("params", PARAMS[:2], ids=["greedy", "sampled"])
def test_max_new_tokens_is_exact(name: str, params: SamplingParams, golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle(name))
    whole = inference.generate([PROMPTS[1]], params)[0]
    assert whole.finish_reason == "length"
    for count in range(1, 2 * DRAFT_LENGTH + 4):
        completion = inference.generate([PROMPTS[1]], params.model_copy(update={"max_new_tokens": count}))[0]
        assert completion.finish_reason == "length"
        assert_cut(completion, whole, count)
        assert inference.text is not None
        assert completion.text == inference.text.decode(completion.token_ids)
        if params.greedy:
            assert completion.token_ids == whole.token_ids[:count]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_stop_string_that_ends_at_any_slot_of_a_block(name: str, golden_bundle: GoldenBundle) -> None:
    inference = load(golden_bundle(name))
    tried: defaultdict[int, int] = defaultdict(int)
    for params in PARAMS[:3]:
        for prompt in PROMPTS:
            whole = inference.generate([prompt], params)[0]
            for slot, ends in ends_by_slot(whole).items():
                for end in ends[: max(0, 4 - tried[slot])]:
                    assert inference.text is not None
                    text = inference.text.decode(whole.token_ids[: end + 1])
                    stop = text if tried[slot] % 2 else text[-3:]
                    if inference.text.decode(whole.token_ids[:end]).find(stop) >= 0:
                        continue  # it ends an earlier block
                    completion = inference.generate([prompt], params.model_copy(update={"stop": ("never", stop)}))[0]
                    assert completion.finish_reason == "stop"
                    assert completion.text == text.removesuffix(stop)
                    assert_cut(completion, whole, end + 1)
                    tried[slot] += 1
    assert sorted(tried) == list(range(DRAFT_LENGTH + 1))


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_eos_at_any_slot_of_a_block(name: str, golden_bundle: GoldenBundle) -> None:
    """Tokens that appear for the first time in their output are declared stop tokens."""
    model = Model.open(golden_bundle(name))
    endless = model.stopping_at()
    tried: defaultdict[int, int] = defaultdict(int)
    for params in PARAMS:
        for prompt in PROMPTS:
            whole = endless.generate([prompt], params)[0]
            for slot, ends in ends_by_slot(whole).items():
                for end in ends:
                    token = whole.token_ids[end]
                    if tried[slot] > 1 or token in whole.token_ids[:end]:
                        continue
                    completion = model.stopping_at(3, token, 5).generate([prompt], params)[0]
                    assert completion.finish_reason == "stop"
                    assert endless.text is not None
                    assert completion.text == endless.text.decode(whole.token_ids[:end])  # a stop token is no text
                    assert_cut(completion, whole, end + 1)
                    tried[slot] += 1
        if len(tried) > DRAFT_LENGTH and min(tried.values()) > 1:
            break
    assert sorted(tried) == list(range(DRAFT_LENGTH + 1))


def test_the_first_token_can_be_the_end(golden_bundle: GoldenBundle) -> None:
    model = Model.open(golden_bundle("dspark_vanilla"))
    for stop_token_ids, params in [((ord("i"),), SamplingParams()), ((), SamplingParams(stop=("i",)))]:
        completion = model.stopping_at(*stop_token_ids).generate([PROMPTS[1]], params)[0]
        assert (completion.token_ids, completion.text, completion.finish_reason) == ([ord("i")], "", "stop")
        assert completion.stats.rounds == 0
        assert completion.stats.acceptance_length is None


@pytest.mark.parametrize(
    "options", [{"stop": ("never", "<mask>")}, {"stop_token_ids": (128,)}, {"stop_token_ids": (5, 128), "stop": ("x",)}]
)
def test_a_special_token_stops_by_its_id(options: dict[str, Any], golden_bundle: GoldenBundle) -> None:
    """Special tokens are no text, so no stop string can be found in what they spell."""
    model = Model.open(golden_bundle("dspark_vanilla")).stopping_at()
    forced = SamplingParams(max_new_tokens=4, logit_bias={128: 1e9})
    endless = model.generate([PROMPTS[1]], forced)[0]
    assert (endless.token_ids, endless.text, endless.finish_reason) == ([128] * 4, "", "length")
    ended = model.generate([PROMPTS[1]], forced.model_copy(update=options))[0]
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([128], "", "stop")
    assert model.generate([PROMPTS[1]], forced)[0].finish_reason == "length", "one request's stops are its own"


def test_stop_token_ids_end_a_block(golden_bundle: GoldenBundle) -> None:
    """As the model's own stop tokens do, at every slot."""
    model = Model.open(golden_bundle("dspark_vanilla"))
    whole = model.stopping_at().generate([PROMPTS[1]], PARAMS[0])[0]
    for end, token in enumerate(whole.token_ids[:16]):
        if token not in whole.token_ids[:end]:
            asked = PARAMS[0].model_copy(update={"stop_token_ids": (token,)})
            completion = model.stopping_at().generate([PROMPTS[1]], asked)[0]
            assert outcome(completion) == outcome(model.stopping_at(token).generate([PROMPTS[1]], PARAMS[0])[0])
            assert len(completion.token_ids) == end + 1


def test_a_stop_token_outside_the_vocabulary_is_refused(golden_bundle: GoldenBundle) -> None:
    model = Model.open(golden_bundle("dspark_vanilla")).stopping_at()
    with pytest.raises(RequestError, match="stop_token_ids names token 160; the vocabulary ends at 159"):
        model.generate([PROMPTS[1]], SamplingParams(stop_token_ids=(160,)))


def test_an_end_at_the_last_token_allowed_counts_as_stop(golden_bundle: GoldenBundle) -> None:
    model = Model.open(golden_bundle("dspark_vanilla"))
    whole = model.stopping_at().generate([PROMPTS[1]], PARAMS[0])[0]
    for count in range(1, 8):
        token = whole.token_ids[count - 1]
        if token not in whole.token_ids[: count - 1]:
            limited = PARAMS[0].model_copy(update={"max_new_tokens": count})
            assert model.stopping_at(token).generate([PROMPTS[1]], limited)[0].finish_reason == "stop"


def test_both_lists_of_eos_tokens_stop(tmp_path: Path) -> None:
    """One in ``config.json``, a list in ``generation_config.json``: each of them ends a text."""
    folder = shutil.copytree(GOLDEN / "qwen3_target", tmp_path / "target")
    for file, value in [("config.json", ord("s")), ("generation_config.json", [129, ord("h")])]:
        content = json.loads((folder / file).read_text()) | {"eos_token_id": value}
        (folder / file).write_text(json.dumps(content))
    export_bundle(prepare(folder, GOLDEN / "dspark_vanilla", tmp_path / "bundle"))
    inference = load(tmp_path / "bundle")
    assert inference.generate([PROMPTS[1]])[0].text == "in t"  # "in the class"
    avoiding = SamplingParams(logit_bias={ord("h"): -1e9})
    ended = inference.generate([PROMPTS[1]], avoiding)[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == ord("s")
    forced = inference.generate([PROMPTS[1]], SamplingParams(logit_bias={129: 1e9}))[0]
    assert (forced.token_ids, forced.text, forced.finish_reason) == ([129], "", "stop")
