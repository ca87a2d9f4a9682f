"""Drafters in every public layout and with every head, against the reference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark.runtime import SamplingParams
from tests.checkpoints import OMIT, write_deepspec, write_eagle3, write_speculators, write_target, write_zlab_dflash
from tests.checkpoints.weights import Weights
from tests.reference import Decoding
from tests.support.exported import Pair, Recorder, assert_same_decoding, export

TEXT = np.random.default_rng(5).integers(0, 90, 60).tolist()
PROMPTS = [TEXT[:1], TEXT[10:32], TEXT[20:60]]
STEPS = 5  # what the reader assumes where a legacy file does not say


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("drafters") / "target", "qwen3", num_hidden_layers=5)


@pytest.fixture
def compare(target: Path, tmp_path: Path) -> Callable[..., Pair]:
    """Writes a drafter, exports it, and compares: all of every draft, and with a confidence head also cut drafts."""

    def compare(write: Callable[..., Path], **options: Any) -> Pair:
        pair = Pair.make(target, write(tmp_path / "drafter", target, **options), tmp_path / "bundle", STEPS)
        decoded = assert_same_decoding(pair, PROMPTS[1:], 16)
        assert accepted(decoded) > 0
        confidences = [output["confidence"] for output in pair.graphs.outputs("head") if "confidence" in output]
        if confidences:
            low, high = np.sort(1 / (1 + np.exp(-np.concatenate(confidences).ravel()))[-21:])[10:12]
            cut = assert_same_decoding(pair, PROMPTS[:2], 16, threshold=float(low + high) / 2)
            assert len({length for each in cut for length in each.proposal_lengths}) > 1
        return pair

    return compare


def accepted(decoded: list[Decoding]) -> int:
    return sum(sum(each.accepted_draft_lengths) for each in decoded)


# Heads

CONFIDENCES = ["none", "hidden", "markov"]


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_heads(head: str, confidence: str, compare: Callable[..., Pair]) -> None:
    pair = compare(write_deepspec, head=head, confidence=confidence)
    described = pair.graphs.bundle.manifest.head
    assert described is not None
    inputs = {"none": "none", "hidden": "hidden", "markov": "hidden_and_markov"}
    assert (described.kind, described.confidence) == (head, inputs[confidence])


@pytest.mark.parametrize(
    ("head", "confidence"),
    [("vanilla", "markov"), ("gated", "markov"), ("rnn", "markov"), ("rnn", "none"), ("vanilla", "hidden")],
)
def test_heads_after_a_silent_anchor(head: str, confidence: str, compare: Callable[..., Pair]) -> None:
    """The first proposal is slot 1's: its previous token is still the anchor, and an RNN starts there."""
    pair = compare(write_speculators, head=head, confidence=confidence, sample_from_anchor=False)
    assert pair.graphs.bundle.manifest.drafter.draft_length == 4


def test_a_confidence_head_without_a_markov_head(compare: Callable[..., Pair]) -> None:
    pair = compare(write_deepspec, head="none", confidence="hidden")
    assert pair.graphs.bundle.manifest.drafter.kind == "dspark"


@pytest.mark.parametrize(("threshold", "lengths"), [(0.0, {5}), (1.0, {0})])
def test_thresholds_of_all_and_nothing(threshold: float, lengths: set[int], target: Path, tmp_path: Path) -> None:
    pair = Pair.make(target, write_deepspec(tmp_path / "drafter", target), tmp_path / "bundle")
    decoded = assert_same_decoding(pair, PROMPTS, threshold=threshold)
    assert {length for each in decoded for length in each.proposal_lengths} == lengths


@pytest.mark.parametrize("rank", [1, 40])
def test_ranks(rank: int, compare: Callable[..., Pair]) -> None:
    compare(write_deepspec, head="rnn", rank=rank)


WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "dspark": lambda folder, target: write_speculators(folder, target, draft_vocab=60, head="rnn"),
    "dflash": lambda folder, target: write_zlab_dflash(folder, target),
    "eagle3": lambda folder, target: write_eagle3(folder, target, draft_vocab=60),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_draws_come_from_the_logits_that_are_returned(kind: str, target: Path, tmp_path: Path) -> None:
    """While sampling, with another temperature in each request; the tokens are the uniforms' place in the sum."""
    graphs = Recorder(export(target, WRITERS[kind](tmp_path / "drafter", target), tmp_path / "bundle"))
    params = [SamplingParams(max_new_tokens=16, temperature=each, seed=7) for each in (0.4, 1.0, 1.7)]
    graphs.model(batch_size=3).generate(PROMPTS, params)
    table = graphs.bundle.draft_vocabulary()
    calls = [call for call in graphs.calls if "draft_logits" in call.outputs]
    assert len(calls) > 4
    for call in calls:
        logits = call.outputs["draft_logits"].astype(np.float64) / call.inputs["temperature"][:, None, None]
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        cumulative = (weights / weights.sum(axis=-1, keepdims=True)).cumsum(axis=-1)
        uniform = call.inputs["uniform"]
        tokens = call.outputs["tokens"] if table is None else np.searchsorted(table, call.outputs["tokens"])
        assert table is None or (table[tokens] == call.outputs["tokens"]).all()
        above = np.take_along_axis(cumulative, tokens[..., None], -1)[..., 0]
        below = np.take_along_axis(np.insert(cumulative, 0, 0, axis=-1), tokens[..., None], -1)[..., 0]
        assert ((below - 1e-5 <= uniform) & (uniform <= above + 1e-5)).all()


# Blocks

BLOCKS: dict[str, dict[str, Any]] = {
    "one-slot": {"block_size": 1},
    "two-slots": {"block_size": 2},
    "nine-slots": {"block_size": 9},
    "one-layer": {"layers": 1},
    "three-layers": {"layers": 3},
    "one-tap": {"taps": [2]},
    "embedding-tap": {"taps": [-1, 1, 3]},
    "last-taps": {"taps": [2, 3]},
    "all-taps": {"taps": [-1, 0, 1, 2, 3]},
    "borrowed": {"own_embedding": False},
    "spellings": {
        "target_layer_ids": OMIT,
        "mask_token_id": OMIT,
        "dspark_mask_token_id": 95,
        "dspark_config": {"target_layer_ids": [0, 1, 2]},
    },
    "other-mask": {"mask_token_id": 11},
}


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks(case: str, target: Path, tmp_path: Path) -> None:
    drafter = write_deepspec(tmp_path / "drafter", target, head="vanilla", **BLOCKS[case])
    assert_same_decoding(Pair.make(target, drafter, tmp_path / "bundle"), PROMPTS)


# DFlash

WINDOW: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
DFLASH: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "deepspec": (write_deepspec, {"head": "none", "confidence": "none"}),
    "deepspec-window": (write_deepspec, {"head": "none", "confidence": "none", **WINDOW}),
    "zlab": (write_zlab_dflash, {}),
    "zlab-nested-size": (write_zlab_dflash, {"block_size": OMIT, "dflash": {"block_size": 6}}),
    "zlab-no-size": (write_zlab_dflash, {"block_size": OMIT}),
    "zlab-no-taps": (write_zlab_dflash, {"taps": None}),
    "zlab-window": (write_zlab_dflash, WINDOW),
    "zlab-window-wide": (write_zlab_dflash, {**WINDOW, "sliding_window": 30}),
    "zlab-window-longer": (write_zlab_dflash, {**WINDOW, "sliding_window": 1000}),
    "zlab-window-both-ways": (write_zlab_dflash, {**WINDOW, "dflash": {"causal": False}}),
    "zlab-all-causal": (write_zlab_dflash, {**WINDOW, "is_causal": True}),
    "zlab-none-causal": (write_zlab_dflash, {**WINDOW, "is_causal": False}),
    "speculators": (write_speculators, {"kind": "dflash"}),
    "speculators-anchor": (write_speculators, {"kind": "dflash", "sample_from_anchor": True}),
    "speculators-unsaid": (write_speculators, {"kind": "dflash", "sample_from_anchor": OMIT}),
    "speculators-reduced": (write_speculators, {"kind": "dflash", "draft_vocab": 60}),
}


@pytest.mark.parametrize("case", DFLASH)
def test_dflash(case: str, compare: Callable[..., Pair]) -> None:
    write, options = DFLASH[case]
    described = compare(write, **options).graphs.bundle.manifest
    assert described.drafter.kind == "dflash"
    assert described.head.confidence == "none"


# Speculators


@pytest.mark.parametrize(
    ("head", "anchor", "size"),
    [
        ("vanilla", True, 60),
        ("gated", True, 60),
        ("rnn", True, 60),
        ("rnn", False, 60),
        ("vanilla", False, 1),
        ("gated", True, 95),
    ],
)
def test_reduced_vocabularies(head: str, anchor: bool, size: int, target: Path, tmp_path: Path) -> None:
    drafter = write_speculators(tmp_path / "d", target, draft_vocab=size, head=head, sample_from_anchor=anchor)
    pair = Pair.make(target, drafter, tmp_path / "bundle")
    assert_same_decoding(pair, PROMPTS)
    assert pair.graphs.bundle.manifest.drafter.vocabulary_size == size
    kept = load_file(drafter / "model.safetensors")["t2d"].nonzero()[0]
    assert pair.graphs.bundle.draft_vocabulary().tolist() == kept.tolist()


SPECULATORS: dict[str, dict[str, Any]] = {
    "full": {},
    "anchor-unsaid": {"sample_from_anchor": OMIT},
    "reduced": {"draft_vocab": 60},
    "window-causal": {"sliding_window_non_causal": False, "backbone_changes": WINDOW},
    "window-both-ways": {"sliding_window_non_causal": True, "backbone_changes": WINDOW},
    "window-unsaid": {"sliding_window_non_causal": OMIT, "backbone_changes": WINDOW},
    "class-defaults": {
        "backbone_changes": {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 32},
    },
    "llama-layers": {"backbone_changes": {"model_type": "llama"}},
}


@pytest.mark.parametrize("case", SPECULATORS)
def test_speculators(case: str, compare: Callable[..., Pair]) -> None:
    compare(write_speculators, **SPECULATORS[case])


def test_tables_of_a_full_vocabulary(target: Path, tmp_path: Path) -> None:
    drafter = write_speculators(tmp_path / "drafter", target)
    tensors = load_file(drafter / "model.safetensors")
    tensors |= {"d2t": np.zeros(96, np.int64), "t2d": np.ones(96, bool)}
    save_file(tensors, drafter / "model.safetensors")
    pair = Pair.make(target, drafter, tmp_path / "bundle")
    assert pair.graphs.bundle.manifest.drafter.draft_vocabulary is None
    assert_same_decoding(pair, PROMPTS)


# EAGLE-3

EAGLE3: dict[str, dict[str, Any]] = {
    "deepspec": {"layout": "deepspec", "taps": [0, 1, 2, 3]},
    "deepspec-one-step": {"layout": "deepspec", "taps": [-1, 0, 1, 2, 3], "steps": 1},
    "deepspec-seven-steps": {"layout": "deepspec", "taps": [-1, 0, 1, 2, 3], "steps": 7},
    "speculators": {},
    "speculators-reduced": {"draft_vocab": 60},
    "speculators-embedding-tap": {"taps": [-1, 1, 3]},
    "speculators-norm-before-residual": {"norm_before_residual": True, "draft_vocab": 60},
    "speculators-norm-before-fc": {"norm_before_fc": True, "draft_vocab": 60},
    "speculators-fc-norm": {"fc_norm": True, "draft_vocab": 60},
    "speculators-norms": {"fc_norm": True, "norm_before_residual": True},
    "speculators-norm-output": {"norm_output": True, "fc_norm": True, "draft_vocab": 60},
    "legacy": {"layout": "legacy", "taps": [0, 1, 2]},
    "legacy-norm-output": {"layout": "legacy", "taps": [0, 1, 2], "norm_output": True},
    "legacy-reduced": {"layout": "legacy", "taps": [0, 2, 3], "draft_vocab": 60},
    "legacy-top-level-taps": {
        "layout": "legacy",
        "taps": [0, 1, 2],
        "eagle_config": OMIT,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    },
}


@pytest.mark.parametrize("case", EAGLE3)
def test_eagle3(case: str, target: Path, tmp_path: Path) -> None:
    pair = Pair.make(
        target, write_eagle3(tmp_path / "drafter", target, **EAGLE3[case]), tmp_path / "bundle", steps_of(EAGLE3[case])
    )
    assert pair.graphs.bundle.manifest.drafter.kind == "eagle3"
    assert accepted(assert_same_decoding(pair, PROMPTS)) > 0


def steps_of(options: dict[str, Any]) -> int | None:
    return STEPS if options.get("layout") == "legacy" else None


def test_the_default_taps_of_eagle3(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", num_hidden_layers=10)
    folder = write_eagle3(tmp_path / "drafter", target, layout="legacy", taps=[1, 4, 6])
    assert "eagle_config" not in json.loads((folder / "config.json").read_text())
    pair = Pair.make(target, folder, tmp_path / "bundle", STEPS)
    assert pair.graphs.bundle.manifest.drafter.taps == (1, 4, 6)
    assert_same_decoding(pair, PROMPTS)


@pytest.mark.parametrize("layout", ["speculators", "legacy"])
def test_eagle3_of_two_layers(layout: str, target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "drafter", target, layout=layout, taps=[0, 1, 2])
    config = json.loads((folder / "config.json").read_text())
    backbone = config.get("transformer_layer_config", config)
    backbone["num_hidden_layers"] = 2
    backbone |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    extra = Weights(9).layer("layers.1", shape | {"head_dim": 16}, 0.3)
    tensors |= {name: tensor.astype(np.float32) for name, tensor in extra.items()}
    save_file(tensors, folder / "model.safetensors")
    pair = Pair.make(target, folder, tmp_path / "bundle", steps_of({"layout": layout}))
    assert pair.graphs.bundle.manifest.drafter.cache.layers == 2
    assert_same_decoding(pair, PROMPTS)


def test_eagle3_of_another_width_than_its_target(target: Path, tmp_path: Path) -> None:
    """Its own embedding and LM head, its fc from the target's width to its own."""
    wide = write_target(tmp_path / "wide", "qwen3", hidden_size=48)
    folder = write_eagle3(tmp_path / "drafter", wide, layout="legacy", taps=[0, 1, 2], draft_vocab=60)
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] = Weights(3).matrix(48, 3 * 32).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert_same_decoding(Pair.make(target, folder, tmp_path / "bundle", STEPS), PROMPTS)
