"""DSpark and DFlash drafters in the layouts of DeepSpec, z-lab and speculators."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark.exporter.checkpoints import read_drafter
from dspark.exporter.checkpoints.description import ConfidenceInput, Drafter, DrafterKind, HeadKind, Layer, Target
from dspark.exporter.errors import CheckpointError
from tests.exporter.checkpoints.editing import GOLDEN, Checkpoint

Copy = Callable[[str], Checkpoint]
Edit = Callable[[Checkpoint], Any]

BOTH = ConfidenceInput.HIDDEN_AND_MARKOV
NO_CONFIDENCE = ConfidenceInput.NONE


@pytest.mark.parametrize(
    ("name", "layout", "kind", "head", "rank", "confidence"),
    [
        ("dspark_vanilla", "deepspec", DrafterKind.DSPARK, HeadKind.VANILLA, 16, BOTH),
        ("dspark_gated", "deepspec", DrafterKind.DSPARK, HeadKind.GATED, 16, BOTH),
        ("dflash", "deepspec", DrafterKind.DFLASH, HeadKind.NONE, 0, NO_CONFIDENCE),
        ("speculators_dspark", "speculators", DrafterKind.DSPARK, HeadKind.VANILLA, 16, BOTH),
    ],
)
def test_golden_drafters(
    target: Target, name: str, layout: str, kind: DrafterKind, head: HeadKind, rank: int, confidence: ConfidenceInput
) -> None:
    drafter = read_drafter(GOLDEN / name, target)
    assert (drafter.kind, drafter.layout, drafter.name) == (kind, layout, name)
    assert (drafter.head, drafter.markov_rank, drafter.confidence) == (head, rank, confidence)
    assert drafter.taps == (0, 2, 4, 6)
    assert (drafter.block_size, drafter.anchor_predicts, drafter.draft_length, drafter.mask_token_id) == (
        5,
        True,
        5,
        128,
    )
    assert (drafter.vocabulary_size, drafter.draft_vocabulary) == (160, None)
    backbone = drafter.backbone
    assert (backbone.hidden_size, backbone.intermediate_size, backbone.norm_epsilon) == (64, 160, 1e-6)
    assert (backbone.head_count, backbone.kv_head_count, backbone.head_dim) == (4, 2, 16)
    assert backbone.layers == (Layer(None, causal=False),) * 2
    stored = load_file(GOLDEN / name / "model.safetensors")
    assert drafter.tensors.keys() == stored.keys()
    for key, tensor in drafter.tensors.items():
        np.testing.assert_array_equal(tensor.load(), stored[key])


def test_taps_are_layer_outputs(target: Target) -> None:
    """The golden features are the reference's outputs of the layers that every layout's taps name."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "qwen3_target", dtype=torch.float32)
    golden = np.load(GOLDEN / "dspark_vanilla" / "golden.npz")
    with torch.no_grad():
        states = model(torch.from_numpy(golden["0.prompt"])[None].long(), output_hidden_states=True).hidden_states
    for name in ("dspark_vanilla", "speculators_dspark"):
        taps = read_drafter(GOLDEN / name, target).taps
        features = torch.cat([states[tap + 1][0] for tap in taps], dim=-1).numpy()
        np.testing.assert_allclose(features, golden["0.taps"], rtol=1e-4, atol=1e-4)
        shifted = torch.cat([states[tap][0] for tap in taps], dim=-1).numpy()
        assert np.abs(shifted - golden["0.taps"]).max() > 0.1


def test_a_drafter_without_embedding_and_head_borrows_them(copy: Copy, target: Target) -> None:
    checkpoint = copy("dspark_vanilla")
    checkpoint.drop("embed_tokens.weight", "lm_head.weight")
    drafter = read_drafter(checkpoint.write(), target)
    assert not {"embed_tokens.weight", "lm_head.weight"} & drafter.tensors.keys()


def rnn(checkpoint: Checkpoint) -> None:
    checkpoint.config["markov_head_type"] = "rnn"
    checkpoint.reshape("markov_head.joint_proj.weight", 48, 96)
    checkpoint.reshape("markov_head.joint_proj.bias", 48)


def confidence_of_hidden(checkpoint: Checkpoint) -> None:
    checkpoint.config["confidence_head_with_markov"] = False
    checkpoint.reshape("confidence_head.proj.weight", 1, 64)


def no_confidence(checkpoint: Checkpoint) -> None:
    checkpoint.config["enable_confidence_head"] = False
    del checkpoint.config["confidence_head_with_markov"]
    checkpoint.drop("confidence_head.proj.weight", "confidence_head.proj.bias")


@pytest.mark.parametrize(
    ("edit", "head", "confidence"),
    [
        (rnn, HeadKind.RNN, BOTH),
        (confidence_of_hidden, HeadKind.VANILLA, ConfidenceInput.HIDDEN),
        (no_confidence, HeadKind.VANILLA, NO_CONFIDENCE),
    ],
)
def test_heads(copy: Copy, target: Target, edit: Edit, head: HeadKind, confidence: ConfidenceInput) -> None:
    checkpoint = copy("dspark_vanilla")
    edit(checkpoint)
    drafter = read_drafter(checkpoint.write(), target)
    assert (drafter.kind, drafter.head, drafter.confidence) == (DrafterKind.DSPARK, head, confidence)


SETTINGS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "num_target_layers",
)


def nest(checkpoint: Checkpoint, place: str) -> None:
    moved = {key: checkpoint.config.pop(key) for key in SETTINGS}
    if place == "dspark_":
        checkpoint.config |= {f"dspark_{key}": value for key, value in moved.items()}
        checkpoint.config["dspark_noise_token_id"] = checkpoint.config.pop("dspark_mask_token_id")
    elif place == "split":
        checkpoint.config |= {"dspark_config": {"markov_rank": moved.pop("markov_rank")}, "dflash_config": moved}
    else:
        checkpoint.config[place] = moved


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "DSparkDraftModel"])
@pytest.mark.parametrize("place", ["dspark_config", "dflash_config", "dspark_", "split"])
def test_nested_spellings(copy: Copy, target: Target, place: str, architecture: str) -> None:
    checkpoint = copy("dspark_vanilla")
    plain = read_drafter(checkpoint.folder, target)
    nest(checkpoint, place)
    checkpoint.config["architectures"] = [architecture]
    nested = read_drafter(checkpoint.write(), target)
    assert replace(nested, tensors={}) == replace(plain, tensors={})


@pytest.mark.parametrize("key", SETTINGS[:4])
@pytest.mark.parametrize("place", ["dspark_config", "dflash_config", "dspark_"])
def test_contradicting_spellings(copy: Copy, target: Target, place: str, key: str) -> None:
    checkpoint = copy("dspark_vanilla")
    own = checkpoint.config[key]
    other = [1, 2, 4, 6] if key == "target_layer_ids" else own + 1
    checkpoint.config |= {f"dspark_{key}": other} if place == "dspark_" else {place: {key: other}}
    spelling = f"dspark_{key}" if place == "dspark_" else rf"{place}\.{key}"
    with pytest.raises(CheckpointError, match=rf"config.json: {key} = .* contradicts {spelling} = "):
        read_drafter(checkpoint.write(), target)


def test_an_agreeing_spelling_and_null_are_no_contradiction(copy: Copy, target: Target) -> None:
    checkpoint = copy("dspark_vanilla")
    checkpoint.config |= {"dspark_config": {"block_size": 5, "markov_rank": None}, "dflash_config": None}
    assert read_drafter(checkpoint.write(), target).block_size == 5


def zlab(checkpoint: Checkpoint, **dflash: Any) -> None:
    """The golden DFlash drafter as z-lab writes it."""
    config = checkpoint.config
    for key in ("target_layer_ids", "mask_token_id", "enable_confidence_head", "markov_rank", "num_anchors"):
        del config[key]
    config |= {"architectures": ["DFlashDraftModel"], "tie_word_embeddings": True}
    config["dflash_config"] = {"mask_token_id": 128, "target_layer_ids": [1, 3, 4, 6], **dflash}
    checkpoint.drop("embed_tokens.weight", "lm_head.weight")


def test_zlab(copy: Copy, target: Target) -> None:
    checkpoint = copy("dflash")
    zlab(checkpoint)
    drafter = read_drafter(checkpoint.write(), target)
    assert (drafter.layout, drafter.kind, drafter.taps) == ("z-lab", DrafterKind.DFLASH, (1, 3, 4, 6))
    assert (drafter.block_size, drafter.anchor_predicts, drafter.draft_length) == (5, False, 4)
    assert drafter.backbone.layers == (Layer(None, causal=False),) * 2


def test_zlab_block_size_in_dflash_config(copy: Copy, target: Target) -> None:
    checkpoint = copy("dflash")
    zlab(checkpoint, block_size=9)
    del checkpoint.config["block_size"]
    assert read_drafter(checkpoint.write(), target).block_size == 9
    del checkpoint.config["dflash_config"]["block_size"]
    assert read_drafter(checkpoint.write(), target).block_size == 16


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "taps"),
    [
        (8, 2, (1, 5)),
        (8, 1, (4,)),
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 5, (1, 7, 13, 19, 25)),
        (36, 6, (1, 7, 14, 20, 27, 33)),
    ],
)
def test_zlab_spreads_missing_taps(
    copy: Copy, target: Target, target_layers: int, draft_layers: int, taps: tuple[int, ...]
) -> None:
    """The figures are those of published configurations: Qwen3-4B and 8B (36 layers), a 28-layer one."""
    deep = replace(target, backbone=replace(target.backbone, layers=(Layer(),) * target_layers))
    checkpoint = copy("dflash")
    zlab(checkpoint)
    del checkpoint.config["dflash_config"]["target_layer_ids"]
    checkpoint.config |= {"num_target_layers": target_layers, "num_hidden_layers": draft_layers, "layer_types": None}
    for index in range(2, draft_layers):
        for name in [name for name in checkpoint.tensors if name.startswith("layers.0.")]:
            checkpoint.tensors[name.replace("layers.0", f"layers.{index}")] = checkpoint.tensors[name]
    if draft_layers == 1:
        checkpoint.drop(*[name for name in checkpoint.tensors if name.startswith("layers.1.")])
    checkpoint.reshape("fc.weight", 64, 64 * len(taps))
    assert read_drafter(checkpoint.write(), deep).taps == taps


MIXED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("layout", "config", "layers"),
    [
        ("deepspec", {}, [(None, False), (8, False)]),
        ("deepspec", {"is_causal": True}, [(None, True), (8, True)]),
        ("z-lab", {}, [(None, False), (8, True)]),
        ("z-lab", {"is_causal": False}, [(None, False), (8, False)]),
        ("z-lab", {"is_causal": True}, [(None, True), (8, True)]),
        ("z-lab", {"dflash_config": {"causal": False}}, [(None, False), (8, False)]),
        ("speculators", {}, [(None, False), (8, True)]),
        ("speculators", {"sliding_window_non_causal": True}, [(None, False), (8, False)]),
    ],
)
def test_windows_and_causality(
    copy: Copy, target: Target, layout: str, config: dict[str, Any], layers: list[tuple[int | None, bool]]
) -> None:
    checkpoint = copy("speculators_dspark" if layout == "speculators" else "dflash")
    windows = {"layer_types": MIXED, "sliding_window": 8, "use_sliding_window": True}
    if layout == "speculators":
        checkpoint.config["transformer_layer_config"] |= windows
    else:
        checkpoint.config |= windows
    if layout == "z-lab":
        zlab(checkpoint, **config.pop("dflash_config", {}))
    checkpoint.config |= config
    drafter = read_drafter(checkpoint.write(), target)
    assert drafter.backbone.layers == tuple(Layer(window, causal) for window, causal in layers)


@pytest.mark.parametrize(
    ("rope", "pairs"),
    [
        ({"rope_theta": 500000.0, "rope_parameters": None}, 500000.0 ** -(np.arange(0, 16, 2) / 16)),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
            10000.0 ** -(np.arange(0, 16, 2) / 16) / 4,
        ),
        ({"partial_rotary_factor": 0.5}, 10000.0 ** -(np.arange(0, 8, 2) / 8)),
    ],
)
@pytest.mark.parametrize("name", ["dspark_vanilla", "speculators_dspark", "eagle3"])
def test_the_drafters_own_rope_is_kept(copy: Copy, target: Target, name: str, rope: dict[str, Any], pairs: Any) -> None:
    checkpoint = copy(name)
    checkpoint.config.get("transformer_layer_config", checkpoint.config).update(rope)
    drafter = read_drafter(checkpoint.write(), target)
    np.testing.assert_allclose(drafter.backbone.rope.inverse_frequencies, pairs, rtol=1e-6)


def test_speculators_diff_takes_class_defaults(copy: Copy, target: Target) -> None:
    """What a configuration does not say is what the class of its model_type says."""
    checkpoint = copy("speculators_dspark")
    layer_config = checkpoint.config["transformer_layer_config"]
    for key in (
        "rope_parameters",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "attention_bias",
        "layer_types",
    ):
        del layer_config[key]
    drafter = read_drafter(checkpoint.write(), target)
    assert drafter.backbone.norm_epsilon == 1e-6
    np.testing.assert_allclose(
        drafter.backbone.rope.inverse_frequencies, 10000.0 ** -(np.arange(0, 16, 2) / 16), rtol=1e-6
    )
    del layer_config["head_dim"]
    with pytest.raises(
        CheckpointError, match=r"q_norm.weight has the shape \[16\]; \[128\]|q_proj.weight .*\[512, 64\]"
    ):
        read_drafter(checkpoint.write(), target)


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_speculators_predicts_from_slot_1_unless_told(copy: Copy, target: Target, kind: str) -> None:
    checkpoint = copy("speculators_dspark")
    checkpoint.config["speculators_model_type"] = kind
    del checkpoint.config["sample_from_anchor"]
    drafter = read_drafter(checkpoint.write(), target)
    assert (drafter.anchor_predicts, drafter.draft_length) == (False, 4)


def test_speculators_default_taps_and_verifier_tensors(copy: Copy, target: Target) -> None:
    checkpoint = copy("speculators_dspark")
    del checkpoint.config["aux_hidden_state_layer_ids"]
    checkpoint.reshape("fc.weight", 64, 192)
    checkpoint.reshape("verifier_norm.weight", 64)
    checkpoint.reshape("verifier_lm_head.weight", 160, 64)
    drafter = read_drafter(checkpoint.write(), target)
    assert drafter.taps == (1, 3, 4), "inputs of layers 2, 8/2 and 8 - 3"
    assert not any(name.startswith("verifier") for name in drafter.tensors)


def test_speculators_taps_may_include_the_embedding(copy: Copy, target: Target) -> None:
    checkpoint = copy("speculators_dspark")
    checkpoint.config["aux_hidden_state_layer_ids"] = [0, 3, 5, 7]
    assert read_drafter(checkpoint.write(), target).taps == (-1, 2, 4, 6)


KEPT = np.array([3, 4, 10, 57, 60, 128, 129, 158])


def reduce_vocabulary(checkpoint: Checkpoint) -> None:
    checkpoint.config["draft_vocab_size"] = len(KEPT)
    checkpoint.tensors["d2t"] = KEPT - np.arange(len(KEPT))
    checkpoint.tensors["t2d"] = np.isin(np.arange(160), KEPT)
    checkpoint.reshape("lm_head.weight", len(KEPT), 64)
    if "markov_head.markov_w2.weight" in checkpoint.tensors:
        checkpoint.reshape("markov_head.markov_w2.weight", len(KEPT), 16)


@pytest.mark.parametrize("with_t2d", [True, False])
@pytest.mark.parametrize("with_size", [True, False])
def test_reduced_vocabulary(copy: Copy, target: Target, with_t2d: bool, with_size: bool) -> None:
    checkpoint = copy("speculators_dspark")
    reduce_vocabulary(checkpoint)
    if not with_t2d:
        checkpoint.drop("t2d")
    if not with_size:
        del checkpoint.config["draft_vocab_size"]
    drafter = read_drafter(checkpoint.write(), target)
    assert drafter.draft_vocabulary is not None
    assert drafter.draft_vocabulary.dtype == np.int64
    np.testing.assert_array_equal(drafter.draft_vocabulary, KEPT)
    assert drafter.vocabulary_size == 8
    assert drafter.tensors["lm_head.weight"].shape == (8, 64)
    assert drafter.tensors["markov_head.markov_w1.weight"].shape == (160, 16)
    assert not {"d2t", "t2d"} & drafter.tensors.keys()


def test_full_vocabulary_with_tables(copy: Copy, target: Target) -> None:
    checkpoint = copy("speculators_dspark")
    checkpoint.tensors |= {"d2t": np.zeros(160, np.int64), "t2d": np.ones(160, bool)}
    assert read_drafter(checkpoint.write(), target).draft_vocabulary is None


def table(name: str, values: Any) -> Edit:
    return lambda checkpoint: checkpoint.tensors.__setitem__(name, np.asarray(values))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda checkpoint: checkpoint.drop("d2t"), "d2t is missing; the 8 ids of draft_vocab_size"),
        (table("d2t", np.zeros(8, np.int64)), "d2t is all zero, so it was never filled"),
        (table("d2t", KEPT), r"d2t maps draft id 7 to 165, out of range"),
        (table("d2t", np.full(8, -1)), "d2t maps draft id 0 to -1, out of range"),
        (table("d2t", (KEPT - np.arange(8))[::-1].copy()), "target ids must be increasing"),
        (table("d2t", np.zeros(7, np.int64)), r"d2t has the shape \[7\]; \[8\] is needed"),
        (table("d2t", np.zeros(8, np.float32)), "d2t is float32; whole numbers are needed"),
        (table("t2d", np.arange(160) < 8), "the 8 target ids of t2d are not the 8 ids of d2t"),
        (table("t2d", np.isin(np.arange(160), KEPT[:-1])), "the 7 target ids of t2d are not the 8 ids of d2t"),
        (table("t2d", np.ones(128, bool)), r"t2d has the shape \[128\]; \[160\]"),
        (lambda checkpoint: checkpoint.drop("lm_head.weight"), "lacks lm_head.weight"),
        (
            lambda checkpoint: checkpoint.reshape("lm_head.weight", 160, 64),
            r"lm_head.weight has the shape \[160, 64\]; \[8, 64\]",
        ),
        (
            lambda checkpoint: checkpoint.reshape("markov_head.markov_w2.weight", 160, 16),
            r"markov_w2.weight has .*\[8, 16\]",
        ),
        (
            lambda checkpoint: checkpoint.reshape("markov_head.markov_w1.weight", 8, 16),
            r"markov_w1.weight has .*\[160, 16\]",
        ),
        (lambda checkpoint: checkpoint.config.update(draft_vocab_size=161), "draft_vocab_size = 161, but"),
        (lambda checkpoint: checkpoint.config.update(draft_vocab_size=-8), "draft_vocab_size = -8"),
    ],
)
def test_vocabulary_refusals(copy: Copy, target: Target, edit: Edit, message: str) -> None:
    checkpoint = copy("speculators_dspark")
    reduce_vocabulary(checkpoint)
    edit(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(checkpoint.write(), target)


def config(**values: Any) -> Edit:
    return lambda checkpoint: checkpoint.config.update(values)


def without(*keys: str) -> Edit:
    return lambda checkpoint: [checkpoint.config.pop(key) for key in keys]


def drop(*names: str) -> Edit:
    return lambda checkpoint: checkpoint.drop(*names)


def shape(name: str, *sizes: int) -> Edit:
    return lambda checkpoint: checkpoint.reshape(name, *sizes)


def layer_config(**values: Any) -> Edit:
    return lambda checkpoint: checkpoint.config["transformer_layer_config"].update(values)


DEEPSPEC_REFUSALS: list[tuple[Edit, str]] = [
    (without("mask_token_id"), "lacks mask_token_id"),
    (config(mask_token_id=None), "lacks mask_token_id"),
    (config(mask_token_id=160), "mask_token_id = 160 is outside the target's vocabulary of 160"),
    (config(mask_token_id=-1), "mask_token_id = -1 is outside"),
    (config(mask_token_id="128"), "mask_token_id = '128'; a whole number is needed"),
    (without("target_layer_ids"), "lacks target_layer_ids"),
    (config(target_layer_ids=[]), "list of tap layers is empty"),
    (config(target_layer_ids=[0, 2, 4, 7]), "output of layer 7, the last of the target qwen3_target"),
    (config(target_layer_ids=[0, 2, 4, 8]), "output of layer 8 is out of range"),
    (config(target_layer_ids=[-2, 2, 4, 6]), "output of layer -2 is out of range"),
    (config(target_layer_ids=[0, 4, 2, 6]), r"\[0, 4, 2, 6\] must be increasing"),
    (config(target_layer_ids=[0, 2, 2, 6]), "must be increasing"),
    (config(target_layer_ids=[0, 2, 4, 6.0]), "whole numbers are needed"),
    (config(target_layer_ids=[0, 2, 4]), r"fc.weight has the shape \[64, 256\], but 3 taps .* 64 are 192 wide"),
    (config(target_layer_ids=4), "target_layer_ids = 4; a list is needed"),
    (shape("fc.weight", 64, 255), r"fc.weight has the shape \[64, 255\]"),
    (shape("fc.weight", 32, 256), r"fc.weight has the shape \[32, 256\]; \[64, 256\]"),
    (drop("fc.weight"), "lacks fc.weight"),
    (config(num_target_layers=36), "num_target_layers = 36, but the number of layers of the target qwen3_target is 8"),
    (config(vocab_size=151936), "vocab_size = 151936, but the vocabulary size of the target qwen3_target is 160"),
    (config(hidden_size=32), "hidden_size = 32, but that of the target qwen3_target is 64"),
    (config(target_hidden_size=32), "target_hidden_size = 32, but the hidden size of the target"),
    (config(draft_vocab_size=80), "d2t is missing"),
    (config(markov_rank=0), "confidence_head_with_markov = True needs a Markov head, but markov_rank is 0"),
    (config(markov_rank=-1), "markov_rank = -1"),
    (config(markov_rank=8), r"markov_w1.weight has the shape \[160, 16\]; \[160, 8\]"),
    (config(markov_head_type="lstm"), "markov_head_type = 'lstm'; supported are vanilla, gated, rnn"),
    (config(markov_head_type="gated"), "lacks markov_head.gate_proj.bias, markov_head.gate_proj.weight"),
    (config(confidence_head_with_markov=False), r"confidence_head.proj.weight has the shape \[1, 80\]; \[1, 64\]"),
    (without("confidence_head_with_markov"), "lacks confidence_head_with_markov"),
    (config(enable_confidence_head=False), "unexpected confidence_head.proj.bias"),
    (config(enable_confidence_head=1), "enable_confidence_head = 1; true or false is needed"),
    (without("block_size"), "lacks block_size"),
    (config(block_size=0), "block_size = 0 makes 0 draft tokens"),
    (config(block_size=1, sample_from_anchor=False), "block_size = 1 makes 0 draft tokens"),
    (config(num_hidden_layers=3, layer_types=None), "lacks layers.2.input_layernorm.weight"),
    (config(num_hidden_layers=1, layer_types=None), "unexpected layers.1.input_layernorm.weight"),
    (config(attention_bias=True), "lacks layers.0.self_attn.k_proj.bias"),
    (config(hidden_act="gelu"), "hidden_act = 'gelu'"),
    (config(rope_parameters={"rope_type": "longrope"}), "RoPE type 'longrope'"),
    (config(quantization_config={"quant_method": "fp8"}), r"quantization_config \(fp8\)"),
    (config(final_logit_softcapping=30.0), "final_logit_softcapping = 30.0 is not supported"),
    (config(dflash_config={"projector_type": "domino"}), "dflash_config.projector_type = 'domino' is not supported"),
    (config(dspark_config=5), "dspark_config = 5; an object is needed"),
    (
        config(architectures=["Gemma4DSparkModel"]),
        "Gemma4DSparkModel is not supported yet; supported are Qwen3DSparkModel",
    ),
    (config(architectures=["Gemma4Eagle3Model"]), "Gemma4Eagle3Model is not supported yet"),
    (config(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel is not supported yet"),
    (
        config(architectures=["MedusaModel"]),
        r"\['MedusaModel'\] is no known drafter; supported are .*DFlashDraftModel.*eagle3",
    ),
    (config(architectures=None), "is no known drafter; supported are"),
    (config(architectures=["DeepseekV4ForCausalLM"], dspark_block_size=5), "bundled in one checkpoint .*DeepSeek-V4"),
    (shape("mtp.0.norm.weight", 64), r"bundled in one checkpoint \(mtp.0.norm.weight\)"),
    (shape("extra.weight", 1), "unexpected extra.weight"),
]


@pytest.mark.parametrize(("edit", "message"), DEEPSPEC_REFUSALS, ids=[message for _, message in DEEPSPEC_REFUSALS])
def test_deepspec_refusals(copy: Copy, target: Target, edit: Edit, message: str) -> None:
    checkpoint = copy("dspark_vanilla")
    edit(checkpoint)
    with pytest.raises(CheckpointError, match=message) as error:
        read_drafter(checkpoint.write(), target)
    assert str(checkpoint.folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_rank_0_with_the_confidence_flag_alone(copy: Copy, target: Target) -> None:
    checkpoint = copy("dflash")
    checkpoint.config["confidence_head_with_markov"] = True
    with pytest.raises(CheckpointError, match="confidence_head_with_markov = True needs a Markov head"):
        read_drafter(checkpoint.write(), target)


@pytest.mark.parametrize(
    ("dflash", "edit", "message"),
    [
        ({"input_embedding_scale": 8.0}, config(), "dflash_config.input_embedding_scale = 8.0 is not supported"),
        ({"output_multiplier": 0.5}, config(), "dflash_config.output_multiplier = 0.5 is not supported"),
        ({"final_logit_softcapping": 20.0}, config(), "final_logit_softcapping = 20.0 is not supported"),
        ({"conv_kernel_size": 2}, config(), "conv_kernel_size = 2 is not supported"),
        ({"causal": True}, config(is_causal=False), "is_causal = False contradicts dflash_config.causal = True"),
        ({"mask_token_id": None}, config(), "lacks mask_token_id"),
        ({"target_layer_ids": [0, 2, 4, 7]}, config(), "layer 7, the last"),
        ({}, config(block_size=1), "block_size = 1 makes 0 draft tokens"),
        ({}, config(layer_types=["sliding_attention"] * 2), "sliding_window is null"),
        ({}, config(layer_types=["full_attention"]), "layer_types has 1 entries for 2 layers"),
        ({}, config(num_target_layers=9), "num_target_layers = 9, but the number of layers"),
    ],
)
def test_zlab_refusals(copy: Copy, target: Target, dflash: dict[str, Any], edit: Edit, message: str) -> None:
    checkpoint = copy("dflash")
    zlab(checkpoint, **dflash)
    edit(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(checkpoint.write(), target)


def test_zlab_neutral_settings_are_no_features(copy: Copy, target: Target) -> None:
    checkpoint = copy("dflash")
    zlab(
        checkpoint,
        input_embedding_scale=1.0,
        output_multiplier=1,
        final_logit_softcapping=None,
        projector_type="dflash",
    )
    assert read_drafter(checkpoint.write(), target).kind is DrafterKind.DFLASH


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            config(speculators_model_type="mtp"),
            "speculators_model_type = 'mtp' is not supported; supported are dspark, dflash",
        ),
        (config(speculators_model_type="dflash2"), "'dflash2' is not supported"),
        (without("transformer_layer_config"), "transformer_layer_config = None; an object is needed"),
        (layer_config(model_type="gemma3"), "transformer_layer_config.model_type = 'gemma3'; supported are llama"),
        (layer_config(model_type=None), "model_type = None; supported are"),
        (layer_config(num_hidden_layers=3, layer_types=None), "lacks layers.2"),
        (layer_config(vocab_size=100), "vocab_size = 100, but the vocabulary size"),
        (config(aux_hidden_state_layer_ids=[1, 3, 5, 8]), "output of layer 7, the last"),
        (config(aux_hidden_state_layer_ids=[-1, 3, 5, 7]), "output of layer -2 is out of range"),
        (config(aux_hidden_state_layer_ids=["1", 3, 5, 7]), "whole numbers are needed"),
        (without("mask_token_id"), "lacks mask_token_id"),
        (without("block_size"), "lacks block_size"),
        (config(draft_vocab_size=80), "d2t is missing"),
        (config(target_hidden_size=128), "target_hidden_size = 128, but"),
    ],
)
def test_speculators_refusals(copy: Copy, target: Target, edit: Edit, message: str) -> None:
    checkpoint = copy("speculators_dspark")
    edit(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(checkpoint.write(), target)


def test_pickles_and_missing_folders(copy: Copy, target: Target, tmp_path: Path) -> None:
    checkpoint = copy("dflash")
    (checkpoint.folder / "model.safetensors").rename(checkpoint.folder / "drafter.pt")
    with pytest.raises(CheckpointError, match=r"drafter\.pt is a pickle"):
        read_drafter(checkpoint.folder, target)
    with pytest.raises(CheckpointError, match="nothing is not a folder"):
        read_drafter(tmp_path / "nothing", target)


def test_no_weights_are_read(copy: Copy, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a drafter touches headers and vocabulary tables only, whatever its size."""
    from dspark.exporter.checkpoints.tensors import FileTensor

    read: list[str] = []
    original = FileTensor.native_rows

    def spy(self: FileTensor, start: int, stop: int) -> Any:
        read.append(self.name)
        return original(self, start, stop)

    monkeypatch.setattr(FileTensor, "native_rows", spy)
    checkpoint = copy("speculators_dspark")
    reduce_vocabulary(checkpoint)
    drafter: Drafter = read_drafter(checkpoint.write(), target)
    assert [name.rpartition(":")[2] for name in read] == ["d2t", "t2d"]
    assert drafter.files == (checkpoint.folder / "model.safetensors",)
