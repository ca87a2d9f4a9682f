"""EAGLE-3 drafters in the layouts of DeepSpec, speculators and the first ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark.exporter.checkpoints import read_drafter
from dspark.exporter.checkpoints.agreement import default_eagle_taps
from dspark.exporter.checkpoints.description import ConfidenceInput, DrafterKind, HeadKind, Layer, Target
from dspark.exporter.errors import CheckpointError
from tests.exporter.checkpoints.editing import GOLDEN, Checkpoint

Copy = Callable[[str], Checkpoint]
Edit = Callable[[Checkpoint], Any]

KEPT = np.array([0, 5, 6, 99, 129, 159])


def test_golden_drafter(target: Target) -> None:
    drafter = read_drafter(GOLDEN / "eagle3", target)
    assert (drafter.kind, drafter.layout, drafter.name) == (DrafterKind.EAGLE3, "deepspec", "eagle3")
    assert drafter.taps == (0, 1, 3, 5, 6)
    assert (drafter.block_size, drafter.anchor_predicts, drafter.draft_length) == (5, True, 5)
    assert (drafter.head, drafter.markov_rank, drafter.confidence) == (HeadKind.NONE, 0, ConfidenceInput.NONE)
    assert (drafter.mask_token_id, drafter.draft_vocabulary) == (None, None)
    assert (drafter.norm_before_residual, drafter.norm_before_fc, drafter.fc_norm) == (False, False, False)
    assert drafter.backbone.layers == (Layer(None, causal=True),)
    assert drafter.tensors.keys() == load_file(GOLDEN / "eagle3" / "model.safetensors").keys()


def reduce_vocabulary(checkpoint: Checkpoint) -> None:
    checkpoint.config["draft_vocab_size"] = len(KEPT)
    checkpoint.tensors["d2t"] = KEPT - np.arange(len(KEPT))
    checkpoint.tensors["t2d"] = np.isin(np.arange(160), KEPT)
    checkpoint.reshape("lm_head.weight", len(KEPT), 64)


def legacy(checkpoint: Checkpoint) -> None:
    """The golden drafter as a Llama-style head: three taps, its layer called midlayer, its embedding the target's."""
    for key in ("target_layer_ids", "ttt_length", "draft_num_hidden_layers", "num_target_layers"):
        del checkpoint.config[key]
    checkpoint.config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "layer_types": None}
    checkpoint.drop("embed_tokens.weight", "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight")
    checkpoint.reshape("fc.weight", 64, 192)
    checkpoint.rename("layers.0.", "midlayer.")
    reduce_vocabulary(checkpoint)


def speculators(checkpoint: Checkpoint) -> None:
    """The golden drafter as speculators writes it."""
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    layer_config = {key: checkpoint.config[key] for key in (*kept, "vocab_size", "model_type")}
    checkpoint.config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4, 6, 7],
        "norm_before_residual": True,
        "transformer_layer_config": layer_config,
        "speculators_config": {
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "tree", "speculative_tokens": 9},
                {"proposal_type": "greedy", "speculative_tokens": 3},
            ],
        },
    }
    reduce_vocabulary(checkpoint)


def test_legacy(copy: Copy, target: Target) -> None:
    checkpoint = copy("eagle3")
    legacy(checkpoint)
    drafter = read_drafter(checkpoint.write(), target)
    assert (drafter.layout, drafter.kind, drafter.taps) == ("eagle3", DrafterKind.EAGLE3, (1, 3, 4))
    assert drafter.block_size == 5
    assert drafter.draft_vocabulary is not None
    np.testing.assert_array_equal(drafter.draft_vocabulary, KEPT)
    assert drafter.tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert drafter.tensors["layers.0.hidden_norm.weight"].shape == (64,)
    assert "embed_tokens.weight" not in drafter.tensors
    assert not any("midlayer" in name for name in drafter.tensors)
    np.testing.assert_array_equal(
        drafter.tensors["layers.0.self_attn.v_proj.weight"].load(),
        load_file(GOLDEN / "eagle3" / "model.safetensors")["layers.0.self_attn.v_proj.weight"],
    )


@pytest.mark.parametrize("sign", ["architecture", "draft_vocab_size", "eagle_config", "midlayer"])
def test_each_sign_of_a_legacy_drafter_is_enough(copy: Copy, target: Target, sign: str) -> None:
    checkpoint = copy("eagle3")
    legacy(checkpoint)
    if sign != "architecture":
        checkpoint.config["architectures"] = ["LlamaForCausalLM"]
    if sign != "draft_vocab_size":
        del checkpoint.config["draft_vocab_size"]
    if sign == "eagle_config":
        checkpoint.config["eagle_config"] = {"use_aux_hidden_state": True}
    if sign != "midlayer":
        checkpoint.rename("midlayer.", "layers.0.")
    assert read_drafter(checkpoint.write(), target).kind is DrafterKind.EAGLE3


def test_default_taps_are_what_goes_into_layers_2_half_and_n_minus_3(target: Target) -> None:
    """SpecForge writes the layer outputs 1, 46, 90 for Qwen3-235B (94 layers), where vLLM's default is 2, 47, 91."""
    deep = replace(target, backbone=replace(target.backbone, layers=(Layer(),) * 94))
    assert default_eagle_taps(deep) == [1, 46, 90]
    assert default_eagle_taps(target) == [1, 3, 4]


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, (0, 3, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, (0, 3, 6)),
        ({"target_layer_ids": [0, 3, 6]}, (0, 3, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 7]}, (-1, 3, 6)),
        ({"target_layer_ids": [0, 3, 6], "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, (0, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}}, (1, 3, 4)),
    ],
)
def test_legacy_tap_conventions(copy: Copy, target: Target, config: dict[str, Any], taps: tuple[int, ...]) -> None:
    checkpoint = copy("eagle3")
    legacy(checkpoint)
    checkpoint.config |= config
    assert read_drafter(checkpoint.write(), target).taps == taps


def test_speculators(copy: Copy, target: Target) -> None:
    checkpoint = copy("eagle3")
    speculators(checkpoint)
    drafter = read_drafter(checkpoint.write(), target)
    assert (drafter.layout, drafter.taps, drafter.block_size) == ("speculators", (0, 1, 3, 5, 6), 3)
    assert drafter.norm_before_residual
    assert drafter.backbone.norm_epsilon == 1e-6
    assert drafter.draft_vocabulary is not None


@pytest.mark.parametrize("proposals", [None, {}, {"proposal_methods": []}, {"proposal_methods": [{}]}])
def test_speculators_without_a_proposal_method(copy: Copy, target: Target, proposals: Any) -> None:
    checkpoint = copy("eagle3")
    speculators(checkpoint)
    checkpoint.config["speculators_config"] = proposals
    assert read_drafter(checkpoint.write(), target).block_size == 5


def test_norms_before_fc(copy: Copy, target: Target) -> None:
    checkpoint = copy("eagle3")
    speculators(checkpoint)
    checkpoint.config["norm_before_fc"] = True
    checkpoint.reshape("input_norm.weight", 320)
    assert read_drafter(checkpoint.write(), target).norm_before_fc
    checkpoint.config |= {"norm_before_fc": False, "fc_norm": True}
    checkpoint.drop("input_norm.weight")
    for index in range(5):
        checkpoint.reshape(f"fc_norm.{index}.weight", 64)
    assert read_drafter(checkpoint.write(), target).fc_norm


def test_a_second_layer_is_ordinary(copy: Copy, target: Target) -> None:
    checkpoint = copy("eagle3")
    speculators(checkpoint)
    checkpoint.config["transformer_layer_config"]["num_hidden_layers"] = 2
    for name in [name for name in checkpoint.tensors if name.startswith("layers.0.") and "hidden_norm" not in name]:
        rows, *columns = checkpoint.tensors[name].shape
        width = [64] if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else columns
        checkpoint.reshape(name.replace("layers.0", "layers.1"), rows, *width)
    assert len(read_drafter(checkpoint.write(), target).backbone.layers) == 2
    checkpoint.reshape("layers.1.self_attn.q_proj.weight", 64, 128)
    with pytest.raises(
        CheckpointError, match=r"layers.1.self_attn.q_proj.weight has the shape \[64, 128\]; \[64, 64\]"
    ):
        read_drafter(checkpoint.write(), target)


def test_sliding_layers_stay_causal(copy: Copy, target: Target) -> None:
    checkpoint = copy("eagle3")
    speculators(checkpoint)
    windows = {"layer_types": ["sliding_attention"], "sliding_window": 16, "use_sliding_window": True}
    checkpoint.config["transformer_layer_config"] |= windows
    assert read_drafter(checkpoint.write(), target).backbone.layers == (Layer(16, causal=True),)


def narrow(checkpoint: Checkpoint) -> None:
    """A drafter half as wide as its target."""
    speculators(checkpoint)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 20,
    }
    checkpoint.config["transformer_layer_config"] |= sizes
    checkpoint.config["target_hidden_size"] = 64
    shapes = {
        "embed_tokens": (160, 32),
        "lm_head": (len(KEPT), 32),
        "fc": (32, 320),
        "norm": (32,),
        "layers.0.hidden_norm": (32,),
        "layers.0.input_layernorm": (32,),
        "layers.0.post_attention_layernorm": (32,),
        "layers.0.self_attn.q_proj": (40, 64),
        "layers.0.self_attn.k_proj": (20, 64),
        "layers.0.self_attn.v_proj": (20, 64),
        "layers.0.self_attn.o_proj": (32, 40),
        "layers.0.self_attn.q_norm": (20,),
        "layers.0.self_attn.k_norm": (20,),
        "layers.0.mlp.gate_proj": (48, 32),
        "layers.0.mlp.up_proj": (48, 32),
        "layers.0.mlp.down_proj": (32, 48),
    }
    for name, shape in shapes.items():
        checkpoint.reshape(f"{name}.weight", *shape)


def test_a_drafter_of_another_width_needs_its_own_embedding(copy: Copy, target: Target) -> None:
    checkpoint = copy("eagle3")
    narrow(checkpoint)
    assert read_drafter(checkpoint.write(), target).backbone.hidden_size == 32
    checkpoint.drop("embed_tokens.weight")
    with pytest.raises(
        CheckpointError, match=r"hidden_size = 32, but embed_tokens\.weight is the target's, which is 64 wide"
    ):
        read_drafter(checkpoint.write(), target)


def config(**values: Any) -> Edit:
    return lambda checkpoint: checkpoint.config.update(values)


def drop(*names: str) -> Edit:
    return lambda checkpoint: checkpoint.drop(*names)


def shape(name: str, *sizes: int) -> Edit:
    return lambda checkpoint: checkpoint.reshape(name, *sizes)


@pytest.mark.parametrize(
    ("layout", "edit", "message"),
    [
        (None, lambda checkpoint: checkpoint.config.pop("ttt_length"), "lacks ttt_length"),
        (None, config(ttt_length=0), "0 draft steps; 1 to 256 are supported"),
        (None, config(target_layer_ids=[0, 1, 3, 5, 7]), "output of layer 7, the last"),
        (None, config(target_layer_ids=[0, 1, 3, 5]), r"fc.weight has the shape \[64, 320\], but 4 taps"),
        (None, config(num_target_layers=9), "num_target_layers = 9, but"),
        (None, config(draft_num_hidden_layers=2), "num_hidden_layers = 1 contradicts draft_num_hidden_layers = 2"),
        (None, config(vocab_size=100), "vocab_size = 100, but"),
        (None, drop("layers.0.hidden_norm.weight"), "lacks layers.0.hidden_norm.weight"),
        (None, drop("layers.0.self_attn.k_norm.weight"), "lacks layers.0.self_attn.k_norm.weight"),
        (
            None,
            shape("layers.0.self_attn.q_proj.weight", 64, 64),
            r"q_proj.weight has the shape \[64, 64\]; \[64, 128\]",
        ),
        (None, shape("input_norm.weight", 320), "unexpected input_norm.weight.*norm_before_fc = False"),
        (None, config(norm_before_fc=True), "lacks input_norm.weight"),
        (None, config(fc_norm=True), "lacks fc_norm.0.weight"),
        (None, config(fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm exclude each other"),
        (
            legacy,
            config(eagle_config={"use_aux_hidden_state": False}),
            "eagle_config.use_aux_hidden_state = False is not",
        ),
        (legacy, config(eagle_config=3), "eagle_config = 3; an object is needed"),
        (legacy, config(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), "output of layer 7, the last"),
        (legacy, config(eagle_aux_hidden_state_layer_ids=[2, 4]), "but 2 taps"),
        (
            legacy,
            config(
                eagle_aux_hidden_state_layer_ids=[1, 4, 7], eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}
            ),
            "contradicts eagle_aux_hidden_state_layer_ids|eagle_aux_hidden_state_layer_ids taps",
        ),
        (legacy, drop("d2t"), "d2t is missing"),
        (legacy, drop("lm_head.weight"), "lacks lm_head.weight"),
        (legacy, shape("layers.0.hidden_norm.weight", 64), "layers.0.hidden_norm.weight twice"),
        (legacy, config(num_hidden_layers=2), "lacks layers.1.input_layernorm.weight"),
        (legacy, shape("embed_tokens.weight", 100, 64), r"embed_tokens.weight has the shape \[100, 64\]"),
        (speculators, config(speculators_config=3), "speculators_config"),
        (speculators, config(eagle_aux_hidden_state_layer_ids=[1, 2, 4, 6, 8]), "output of layer 7, the last"),
        (speculators, config(target_hidden_size=32), "target_hidden_size = 32, but"),
    ],
)
def test_refusals(copy: Copy, target: Target, layout: Edit | None, edit: Edit, message: str) -> None:
    checkpoint = copy("eagle3")
    if layout is not None:
        layout(checkpoint)
    edit(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(checkpoint.write(), target)


def test_a_tied_head_of_its_own_is_refused(copy: Copy, target: Target) -> None:
    checkpoint = copy("eagle3")
    checkpoint.config["tie_word_embeddings"] = True
    checkpoint.drop("lm_head.weight")
    with pytest.raises(CheckpointError, match="tie_word_embeddings = True with the drafter's own embedding"):
        read_drafter(checkpoint.write(), target)


def test_a_target_too_small_for_default_taps(copy: Copy, target: Target) -> None:
    shallow = replace(target, backbone=replace(target.backbone, layers=(Layer(),) * 5))
    checkpoint = copy("eagle3")
    legacy(checkpoint)
    with pytest.raises(CheckpointError, match=r"tap layers \[1, 1, 1\] must be increasing"):
        read_drafter(checkpoint.write(), shallow)
