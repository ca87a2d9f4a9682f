"""Speculation changes nothing: sampled texts follow the target's exact distribution, greedy ones are the target's own.

The exact distribution is the float64 reference's, shaped by rules that are written here once more.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dspark.exporter.export import export_bundle, prepare
from dspark.runtime import DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.scheduling.options import SchedulerName
from tests.reference import ReferenceTarget
from tests.support.costs import cost_table
from tests.support.golden_models import DRAFTERS, GOLDEN, PROMPTS, Arrays, ids, load, load_with_costs, tampered

GoldenBundle = Callable[[str], Path]


@dataclass(frozen=True)
class Setting:
    """A prompt and sampling options; the joint distribution of all ``max_new_tokens`` tokens is tested."""

    prompt: tuple[int, ...]
    params: SamplingParams


def setting(prompt: str, tokens: int, **options: object) -> Setting:
    return Setting(tuple(ids(prompt)), SamplingParams.parse(SamplingParams(max_new_tokens=tokens), options))


# After "\n" and " " the models are unsure, after "the stri" they are not.
SETTINGS = {
    "temperature 1": setting("the ", 3, temperature=1.0),
    "top-k": setting("is a ", 5, temperature=1.0, top_k=3),
    "top-p": setting("string ", 4, temperature=0.7, top_p=0.9),
    "min-p": setting("the stri", 5, temperature=1.5, min_p=0.15),
    "penalties": setting(  # without them the model would go on with spaces
        "\n", 5, temperature=1.0, top_k=4, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=1.5
    ),
    "bias": setting("to be ", 4, temperature=0.8, top_p=0.8, logit_bias={32: 2.0, 101: -3.0, 116: 1.0}),
}


def shaped(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """The distribution of the next token: bias, penalties, temperature, top-k, top-p, min-p."""
    values = logits.copy()
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in {*prompt, *output}:
        values[token] *= params.repetition_penalty if values[token] < 0 else 1 / params.repetition_penalty
    for token, count in Counter(output).items():
        values[token] -= params.presence_penalty + params.frequency_penalty * count
    values /= params.temperature
    order = np.argsort(-values, kind="stable")
    if params.top_k:
        values[order[params.top_k :]] = -np.inf
    p = np.exp(values - values.max())
    p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


class Exact:
    """The target's distribution of whole texts."""

    def __init__(self, folder: Path) -> None:
        target = ReferenceTarget(folder)
        self._next_logits = cache(lambda tokens: target.forward(tokens)[0][-1])

    def margin(self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> float:
        """How far apart the target's logits of two outputs are where they first differ."""
        place = next(place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        logits = self._next_logits((*prompt, *one[:place]))
        return abs(float(logits[one[place]] - logits[other[place]]))

    def classes(self, chosen: Setting, smallest: float) -> Iterator[tuple[tuple[frozenset[int], ...], float]]:
        """Disjoint classes of texts, each more probable than ``smallest``.

        A class is a set of tokens for each place; it says nothing of the places after its last one. Tokens that would
        make too rare a class are put into one. Tokens that the target excludes are in none.
        """
        yield from self._split(chosen, (), (), 1.0, smallest)

    def _split(
        self,
        chosen: Setting,
        output: tuple[int, ...],
        places: tuple[frozenset[int], ...],
        probability: float,
        smallest: float,
    ) -> Iterator[tuple[tuple[frozenset[int], ...], float]]:
        if len(output) == chosen.params.max_new_tokens or probability < 2 * smallest:
            yield places, probability
            return
        logits = self._next_logits((*chosen.prompt, *output))
        p = probability * shaped(logits, chosen.params, chosen.prompt, output)
        tokens = np.flatnonzero(p)
        tokens = tokens[np.argsort(p[tokens])]
        mass = np.cumsum(p[tokens])
        rare = int(np.searchsorted(p[tokens], smallest, side="right"))
        if rare:
            rare = max(rare, int(np.searchsorted(mass, smallest, side="right")) + 1)
            yield (*places, frozenset(tokens[:rare].tolist())), float(mass[rare - 1])
        for token in tokens[rare:].tolist():
            yield from self._split(chosen, (*output, token), (*places, frozenset([token])), float(p[token]), smallest)


@pytest.fixture(scope="module")
def exact() -> Exact:
    return Exact(GOLDEN / "qwen3_target")


def chi_square(
    outputs: Sequence[Sequence[int]], classes: Sequence[tuple[tuple[frozenset[int], ...], float]]
) -> tuple[float, int]:
    """The statistic and its degrees of freedom."""
    assert abs(sum(probability for _, probability in classes) - 1) < 1e-9
    statistic, seen = 0.0, 0
    for places, probability in classes:
        count = sum(all(token in place for token, place in zip(output, places, strict=False)) for output in outputs)
        expected = len(outputs) * probability
        statistic += (count - expected) ** 2 / expected
        seen += count
    assert seen == len(outputs), "some texts have tokens that the target excludes"
    return statistic, len(classes) - 1


def p_values(inference: DSparkInference, names: Sequence[str], exact: Exact, count: int) -> dict[str, float]:
    """Of each setting and of all together, from requests that share the engine."""
    chosen = [SETTINGS[name] for name in names]
    seeded = [
        (each.prompt, each.params.model_copy(update={"seed": 10_000 * index + seed}))
        for seed in range(count)
        for index, each in enumerate(chosen)
    ]
    prompts, params = zip(*seeded, strict=True)
    outputs = [completion.token_ids for completion in inference.generate(prompts, params)]
    found = {
        name: chi_square(outputs[index :: len(names)], list(exact.classes(each, 5 / count)))
        for index, (name, each) in enumerate(zip(names, chosen, strict=True))
    }
    found["all"] = tuple(map(sum, zip(*found.values(), strict=True)))
    return {name: float(stats.chi2.sf(*each)) for name, each in found.items()}


THRESHOLD = SpeculationOptions(confidence_threshold=0.6)
SHORT = SpeculationOptions("fixed", max_draft_tokens=2)
OFF = SpeculationOptions("off")


@pytest.mark.parametrize(
    ("name", "options", "batch_size", "names"),
    [
        pytest.param("dspark_vanilla", THRESHOLD, 64, list(SETTINGS), id="vanilla-threshold"),
        pytest.param("eagle3", None, 64, ["top-k", "top-p", "penalties"], id="eagle3"),
        pytest.param("dspark_vanilla", None, 1, ["top-k"], id="vanilla-alone"),
        pytest.param("dspark_gated", SHORT, 5, ["top-k", "min-p"], id="gated-short"),
        pytest.param("dflash", None, 5, ["temperature 1", "penalties"], id="dflash"),
    ],
)
def test_sampled_texts_have_the_targets_distribution(
    name: str,
    options: SpeculationOptions | None,
    batch_size: int,
    names: list[str],
    exact: Exact,
    golden_bundle: GoldenBundle,
) -> None:
    found = p_values(load(golden_bundle(name), batch_size, options), names, exact, 200)
    assert min(found.values()) > 1e-3, found


def jagged(requests: int, tokens: int, context: int) -> float:
    """Milliseconds of a step that jumps."""
    return 10 + 0.3 * tokens + 4 * (tokens // (2 * requests))


HARDWARE: list[tuple[str, SchedulerName]] = [
    ("dspark_vanilla", "hardware"),
    ("dspark_vanilla", "hardware-async"),
    ("dspark_gated", "hardware"),
    ("dflash", "hardware"),
    ("eagle3", "hardware-async"),
]


def mixed_with_greedy(
    inference: DSparkInference, names: Sequence[str], exact: Exact, count: int
) -> tuple[dict[str, float], set[int]]:
    """``p_values`` while greedy requests run beside, and the lengths of drafts that were verified."""
    beside = [inference.request(PROMPTS[0], SamplingParams(max_new_tokens=100)) for _ in range(count // 10)]
    for request in beside:
        inference.engine.submit(request)
    found = p_values(inference, names, exact, count)
    return found, {length for request in beside for length in request.stats.draft_lengths}


@pytest.mark.parametrize(("name", "scheduler"), HARDWARE)
def test_knowing_the_hardware_does_not_change_the_distribution(
    name: str, scheduler: SchedulerName, exact: Exact, golden_bundle: GoldenBundle
) -> None:
    inference = load_with_costs(golden_bundle(name), scheduler, cost_table(jagged, max_requests=32), 32)
    found, lengths = mixed_with_greedy(inference, ["temperature 1", "top-k"], exact, 200)
    assert min(found.values()) > 1e-3, found
    assert len(lengths) > 2, "the scheduler must have had something to decide"


def test_a_drafter_of_few_tokens_does_not_change_the_distribution(exact: Exact, tmp_path: Path) -> None:
    """Neither a reduced draft vocabulary nor the likeliest of each slot alone."""
    drafter = GOLDEN / "dspark_vanilla"
    export_bundle(prepare(GOLDEN / "qwen3_target", drafter, tmp_path / "few", draft_vocabulary=115, draft_top_k=6))
    found = p_values(load(tmp_path / "few", 64), list(SETTINGS), exact, 200)
    assert min(found.values()) > 1e-3, found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheduler"), HARDWARE)
def test_knowing_the_hardware_does_not_change_many_texts(
    name: str, scheduler: SchedulerName, exact: Exact, golden_bundle: GoldenBundle
) -> None:
    inference = load_with_costs(golden_bundle(name), scheduler, cost_table(jagged, max_requests=16), 16)
    found, _ = mixed_with_greedy(inference, list(SETTINGS), exact, 1000)
    assert min(found.values()) > 1e-3, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(name, options) for name in DRAFTERS for options in (None, SHORT)],
        *[(name, THRESHOLD) for name in ("dspark_vanilla", "dspark_gated")],
        ("dspark_vanilla", OFF),
    ],
)
def test_many_sampled_texts_have_the_targets_distribution(
    name: str, options: SpeculationOptions | None, exact: Exact, golden_bundle: GoldenBundle
) -> None:
    found = p_values(load(golden_bundle(name), 16, options), list(SETTINGS), exact, 1000)
    assert min(found.values()) > 1e-3, found


def test_a_stream_shared_by_draft_and_recovery_is_caught(
    exact: Exact, golden_bundle: GoldenBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share(sampler: Sampler, count: int) -> np.ndarray:
        return np.full(count, copy.deepcopy(sampler._recovery_stream).random(), np.float32)

    monkeypatch.setattr(Sampler, "draft_uniforms", share)
    found = p_values(load(golden_bundle("dspark_vanilla"), 64), ["top-k", "min-p"], exact, 300)
    assert max(found.values()) < 1e-6, found


def test_a_draft_tested_against_other_logits_is_caught(exact: Exact, golden_bundle: GoldenBundle) -> None:
    def forget_the_markov_bias(graph: str, inputs: Arrays, outputs: Arrays) -> None:
        if graph == "head":
            outputs["draft_logits"][:] = inputs["base_logits"]

    inference = tampered(golden_bundle("dspark_vanilla"), forget_the_markov_bias, 64)
    found = p_values(inference, ["top-k", "bias"], exact, 300)
    assert found["all"] < 1e-6, found


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_texts_are_the_targets_own(name: str, exact: Exact, golden_bundle: GoldenBundle) -> None:
    """With and without speculation, alone and in a batch; they may differ only where the target is undecided."""
    text = [token for prompt in PROMPTS for token in prompt]
    prompts = [text[start : start + 1 + 7 * start % 30] for start in range(0, len(text), 12)]
    params = SamplingParams(max_new_tokens=40)
    plain, *others = (
        load(golden_bundle(name), batch_size, options).generate(prompts, params)
        for batch_size, options in [(1, OFF), (16, OFF), (16, None), (16, SHORT)]
    )
    for completions in others:
        for prompt, expected, completion in zip(prompts, plain, completions, strict=True):
            assert len(completion.token_ids) == len(expected.token_ids)
            if completion.token_ids != expected.token_ids:
                margin = exact.margin(prompt, expected.token_ids, completion.token_ids)
                assert margin < 1e-3, f"{completion.text!r} instead of {expected.text!r}, margin {margin}"
