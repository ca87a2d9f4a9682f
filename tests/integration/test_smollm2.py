"""The real model: speculation changes nothing but the speed."""

import json
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from dspark.exporter.export import export_bundle, prepare
from dspark.exporter.precision import Precision, PrecisionProfile
from dspark.runtime import Bundle, DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.cache.key_value_cache import KeyValueCache
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.model.clock import PhaseClock
from dspark.runtime.model.target import Target, TokenRun
from dspark.runtime.scheduling.options import SchedulerName
from tests.support.graph_host import Host

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parents[2] / "samples"
PROMPTS, DRAFTER = SAMPLES / "prompts", SAMPLES / "smollm2" / "drafter"
NEAR_TIE = 1e-3
"""Logits: a difference between two ways of decoding counts only where the best two are further apart."""


def prompts(count: int) -> list[str]:
    """Prompts of all files in turn."""
    files = sorted(PROMPTS.glob("*.jsonl"))
    rows = [file.read_text(encoding="utf-8").splitlines() for file in files]
    return [json.loads(row)["prompt"] for same_place in zip(*rows, strict=True) for row in same_place][:count]


def margin(bundle: Path, ids: list[int]) -> float:
    """How far the best two logits after these tokens are apart."""
    opened = Bundle.open(bundle, check_hashes=False)
    session = open_sessions(opened, HostOptions(), ["target"], check_hashes=False)["target"]
    target = Target(session, opened.manifest, KeyValueCache(opened.manifest.caches, 1), PhaseClock())
    second, best = np.sort(target.prefill(0, TokenRun(ids, len(ids))).scores.rows[0])[-2:]
    return float(best - second)


def export(gguf: Path, precision: Precision, output: Path) -> Path:
    """SmolLM2 with the quickstart's drafter."""
    profile = PrecisionProfile.of(precision)
    export_bundle(prepare(gguf, DRAFTER, output, precision=profile, draft_vocabulary=8192, draft_top_k=64))
    return output


@pytest.fixture(scope="module")
def bundle(request: pytest.FixtureRequest, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in a precision."""
    return export(smollm2_gguf, Precision(request.param), tmp_path_factory.mktemp("smollm2") / request.param)


@pytest.mark.parametrize("bundle", ["int8"], indirect=True)
def test_int8_does_not_depend_on_neighbours(bundle: Path) -> None:
    """Not by one bit. The tokens are their texts' first, so attention has one key and changes nothing."""
    host = Host(bundle)
    texts = [[token] for token in np.random.default_rng(0).integers(0, 49152, 24).tolist()]
    together = host.step([host.request(text) for text in texts], [1] * len(texts), spare=1)[0]
    for text, beside in zip(texts, together, strict=True):
        assert np.array_equal(host.step([host.request(text)], [1], spare=1)[0][0], beside)


@pytest.mark.parametrize("bundle", ["fp32", "int8"], indirect=True)
def test_greedy_output_equals_plain_decoding(bundle: Path) -> None:
    asked, params = prompts(100), SamplingParams(max_new_tokens=32)
    plain = DSparkInference.load(bundle, options=SpeculationOptions("off"))
    expected = plain.generate(asked, params)
    names: tuple[SchedulerName, ...] = ("fixed", "threshold", "hardware", "hardware-async")
    for name in names:
        found = DSparkInference.load(bundle, options=SpeculationOptions(name)).generate(asked, params)
        accepted = sum(sum(done.stats.accepted_lengths) for done in found)
        # How much is worth verifying on this machine is for the hardware schedulers to say.
        assert accepted > 300 or name.startswith("hardware"), "the drafter must have been of use"
        for prompt, before, after in zip(asked, expected, found, strict=True):
            if before.token_ids != after.token_ids:
                assert bundle.name == "fp32", prompt  # int8 is exact
                pairs = zip(before.token_ids, after.token_ids, strict=False)
                same = [left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
                assert margin(bundle, plain.encode(prompt) + same) <= NEAR_TIE, prompt


def test_every_precision_accepts_as_much(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Within 5 % of fp32, target and drafter both in that precision; int4, whose texts are others, within 10 %."""
    asked, params = prompts(24), SamplingParams(max_new_tokens=48)
    lengths = {}
    for precision in (Precision.FP32, Precision.FP16, Precision.INT8, Precision.INT8_BLOCKS, Precision.INT4):
        exported = export(smollm2_gguf, precision, tmp_path / precision)
        found = DSparkInference.load(exported, options=SpeculationOptions("fixed")).generate(asked, params)
        lengths[precision] = np.mean([done.stats.acceptance_length for done in found])
    reference = lengths[Precision.FP32]
    assert reference > 1.5
    assert lengths.pop(Precision.INT4) == pytest.approx(reference, rel=0.1)
    assert lengths == pytest.approx(dict.fromkeys(lengths, reference), rel=0.05)


def test_long_prompt(smollm2_bundle: Path) -> None:
    """A prompt of many chunks, near the limit of 8 192 tokens, is continued in its own manner."""
    model = DSparkInference.load(smollm2_bundle, batch_size=1)
    ids = model.encode("The quick brown fox jumps over the lazy dog. " * 800, raw=True)[:8000]
    (done,) = model.generate([ids], SamplingParams(max_new_tokens=24))
    assert done.finish_reason == "length"
    assert done.text is not None
    assert "fox jumps over the lazy dog" in done.text
