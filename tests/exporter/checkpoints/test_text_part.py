"""The text part of multimodal checkpoints."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dspark.exporter.checkpoints import read_target
from dspark.exporter.errors import CheckpointError
from tests.exporter.checkpoints.editing import GOLDEN, Checkpoint

Copy = Callable[[str], Checkpoint]
Rename = Callable[[str], str]

LAYOUTS: dict[str, Rename] = {
    "llava": lambda name: f"language_model.{name}",
    "transformers 5": lambda name: name.replace("model.", "model.language_model."),
    "smolvlm": lambda name: name.replace("model.", "model.text_model."),
    "no prefix": lambda name: name,
}


def multimodal(checkpoint: Checkpoint, rename: Rename, **nested: Any) -> Checkpoint:
    """The same weights as the text part of a model that sees pictures."""
    own = {"tie_word_embeddings", "eos_token_id"}
    text = {key: value for key, value in checkpoint.config.items() if key not in own}
    checkpoint.config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text | nested,
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 8},
        **{key: checkpoint.config[key] for key in own},
    }
    checkpoint.tensors = {rename(name): tensor for name, tensor in checkpoint.tensors.items()}
    for name in (
        "vision_tower.embeddings.weight",
        "vision_tower.layers.0.weight",
        "multi_modal_projector.linear_1.weight",
    ):
        checkpoint.tensors[name] = np.zeros((8, 8), np.float32)
    return checkpoint


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama_target", "qwen3_target"])
def test_the_text_part_reads_as_the_text_model(name: str, layout: str, copy: Copy) -> None:
    target = read_target(multimodal(copy(name), LAYOUTS[layout]).write())
    expected = read_target(GOLDEN / name)
    assert (target.family, target.backbone, target.stop_token_ids, target.context_length) == (
        expected.family,
        expected.backbone,
        expected.stop_token_ids,
        expected.context_length,
    )
    assert target.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        np.testing.assert_array_equal(target.tensors[key].load(), tensor.load())
    assert any(
        "only the text part is exported; left out: multi_modal_projector (1 tensors), vision_tower (2 tensors)" in note
        for note in target.notes
    )


def test_a_prefix_alone_is_undone(copy: Copy) -> None:
    checkpoint = copy("llama_target")
    checkpoint.tensors = {f"language_model.{name}": tensor for name, tensor in checkpoint.tensors.items()}
    target = read_target(checkpoint.write())
    assert target.tensors.keys() == read_target(GOLDEN / "llama_target").tensors.keys()
    assert any("left out: nothing" in note for note in target.notes)


def test_both_configurations_stops_count(copy: Copy) -> None:
    checkpoint = multimodal(copy("llama_target"), LAYOUTS["llava"], eos_token_id=[3, 4])
    assert read_target(checkpoint.write()).stop_token_ids == (3, 4, 129)


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        (
            {"model_type": "gemma2"},
            "the text part of LlavaForConditionalGeneration has the model_type 'gemma2', which is not supported; "
            "supported are llama, mistral, qwen2, qwen3",
        ),
        ({"model_type": None}, "has the model_type None"),
        ({"quantization_config": {"quant_method": "awq"}}, r"text_config: quantization_config \(awq\)"),
        ({"num_hidden_layers": 9}, "lacks layers.8"),
    ],
)
def test_refusals(nested: dict[str, Any], message: str, copy: Copy) -> None:
    checkpoint = multimodal(copy("llama_target"), LAYOUTS["llava"], **nested)
    with pytest.raises(CheckpointError, match=message):
        read_target(checkpoint.write())


def test_what_is_there_twice_or_of_another_type_is_refused(copy: Copy) -> None:
    checkpoint = multimodal(copy("qwen3_target"), LAYOUTS["llava"])
    checkpoint.tensors["lm_head.weight"] = np.zeros((160, 64), np.float32)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight twice"):
        read_target(checkpoint.write())
    checkpoint.config["text_config"] = "llama"
    with pytest.raises(CheckpointError, match="text_config = 'llama'; an object is needed"):
        read_target(checkpoint.write())
