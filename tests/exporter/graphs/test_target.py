"""The target's graph by itself: what a token gets depends on its own text alone, however the pass is cut."""

from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from dspark.runtime.bundle.contract import CHOICES, LOGIT_SUMS
from dspark.runtime.bundle.manifest import CacheForm
from tests.checkpoints import write_deepspec, write_eagle3, write_target
from tests.reference import ReferenceTarget
from tests.support.exported import assert_close, export
from tests.support.graph_host import Host, Request

GAMMA = 5
TEXTS = [np.random.default_rng(seed).integers(0, 90, 40).tolist() for seed in range(4)]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mistral-window": ("mistral", {"sliding_window": 4}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
}


@pytest.fixture(scope="module", params=product(MODELS, get_args(CacheForm)), ids="-".join)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a target and a bundle of it, with an EAGLE-3 drafter for one and a block drafter for the others."""
    model, cache_form = request.param
    folder = tmp_path_factory.mktemp(model)
    family, changes = MODELS[model]
    target = write_target(folder / "target", family, **changes)
    write = write_eagle3 if family == "qwen3" else write_deepspec
    export(target, write(folder / "drafter", target), folder / "bundle", cache_form=cache_form)
    return folder


@pytest.fixture(scope="module")
def host(folder: Path) -> Host:
    return Host(folder / "bundle")


def test_one_pass_is_the_reference(folder: Path, host: Host) -> None:
    logits, _ = host.step([host.request(TEXTS[0])], [40])
    assert_close(logits[0], ReferenceTarget(folder / "target").forward(TEXTS[0])[0])


@pytest.mark.parametrize("count", range(1, GAMMA + 2))
def test_many_tokens_are_the_same_as_one_at_a_time(host: Host, count: int) -> None:
    """The logits, cache rows and drafter's context of a verification do not depend on how many tokens share it."""
    together, alone = host.request(TEXTS[0]), host.request(TEXTS[0])
    for request in (together, alone):
        host.step([request], [11])
    logits, extra = host.step([together], [count])
    steps = [host.step([alone], [1]) for _ in range(count)]
    assert_close(logits[0], np.concatenate([step[0][0] for step in steps]), 1e-5)
    axis = 0 if extra[0].ndim == 2 else 2  # a feature [n, H] or rows [2 · layers, Hkv, n, D]
    assert_close(extra[0], np.concatenate([step[1][0] for step in steps], axis=axis), 1e-5)
    assert_close(together.rows, alone.rows, 1e-5)


def test_a_ragged_batch_is_its_requests_alone(host: Host) -> None:
    begins, counts = [1, 17, 30, 8], [6, 1, 3, 2]
    batch, alone = ([host.request(text) for text in TEXTS] for _ in range(2))
    host.step(batch, begins)
    for request, begin in zip(alone, begins, strict=True):
        host.step([request], [begin])
    together = host.step(batch, counts)
    for index, (request, count) in enumerate(zip(alone, counts, strict=True)):
        logits, extra = host.step([request], [count])
        assert_close(together[0][index], logits[0], 1e-5)
        assert_close(together[1][index], extra[0], 1e-5)
        assert_close(batch[index].rows, request.rows, 1e-5)


def test_masked_cache_rows_are_not_seen(host: Host) -> None:
    """Neither the junk beyond a request's length nor its amount changes anything."""
    request = host.request(TEXTS[0])
    host.step([request], [9])
    expected = host.step([request], [3], commit=False)
    for spare in (1, 64):
        logits, extra = host.step([request], [3], spare, commit=False)
        assert_close(logits[0], expected[0][0], 1e-5)
        assert_close(extra[0], expected[1][0], 1e-5)


def test_a_rejected_token_leaves_nothing(host: Host) -> None:
    """Verifying other tokens first and not keeping their rows is as if they had never been computed."""
    request, other = host.request(TEXTS[0]), host.request(TEXTS[0])
    for each in (request, other):
        host.step([each], [9])
    host.step([Request([*TEXTS[0][:9], *TEXTS[1]], other.rows)], [6], commit=False)
    assert np.array_equal(host.step([other], [4])[0][0], host.step([request], [4])[0][0])


def test_names_and_shapes_are_the_contract(host: Host) -> None:
    inputs = {each.name: each.shape for each in host.session.get_inputs()}
    outputs = {each.name: each.shape for each in host.session.get_outputs()}
    assert inputs["logits_index"] == ["K"]
    assert outputs["logits"] == ["K", 96]
    assert inputs["input_ids"] == inputs["position_ids"] == inputs["unpad_index"] == ["N"]
    assert inputs["pad_index"] == ["B", "T"]
    assert inputs["attention_bias"] == ["B", 1, 1, "T", "S" if host.in_place else "S+T"]
    cache = host.info.cache
    for layer in range(cache.layers):
        for part in ("key", "value"):
            assert inputs[f"past.{layer}.{part}"] == ["B", cache.kv_heads, "S", cache.head_dim]
            if host.in_place:
                assert outputs[f"present.{layer}.{part}"] == ["B", cache.kv_heads, "S", cache.head_dim]
            else:
                assert outputs[f"new.{layer}.{part}"] == ["B", cache.kv_heads, "T", cache.head_dim]
    assert host.in_place == ("write_index" in inputs)
    assert {name: outputs.get(name) for name in (CHOICES, LOGIT_SUMS)} == dict.fromkeys(
        (CHOICES, LOGIT_SUMS), ["K"] if host.in_place else None
    )
