"""Target models in Hugging Face folders."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark.configs import model_defaults
from dspark.exporter.checkpoints.decoder import (
    Decoder,
    LayerForm,
    check_tensors,
    layer_shapes,
    read_decoder,
    with_defaults,
)
from dspark.exporter.checkpoints.description import Layer, Target, TextAssets
from dspark.exporter.checkpoints.files import has_file, read_json
from dspark.exporter.checkpoints.folder import open_folder, read_architectures
from dspark.exporter.checkpoints.rope import context_length
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.checkpoints.text import read_text_assets
from dspark.exporter.checkpoints.text_part import text_part
from dspark.exporter.errors import CheckpointError

__all__ = ["read_target_folder", "target_from_config"]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SHOWN_TOKENS = 3


def read_target_folder(path: Path) -> Target:
    """Reads a target model, its tokenizer and its chat template from a Hugging Face folder.

    Of a multimodal model only the text part is read.

    Args:
        path: Holds ``config.json`` and safetensors; tokenizer files and ``generation_config.json`` are read if there.

    Raises:
        CheckpointError: If a file is missing or damaged, the architecture is not supported, or configuration and
            tensors do not agree.
    """
    folder = text_part(open_folder(path))
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if has_file(generation) else {}
    text = read_text_assets(path)
    target = target_from_config(folder.config, generation_config, folder.tensors, text, folder.name, folder.files)
    return replace(target, notes=(*folder.notes, *target.notes))


def target_from_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    text: TextAssets,
    name: str,
    files: tuple[Path, ...],
) -> Target:
    """Describes a target model, whatever file it came in.

    Args:
        config: In the words of Hugging Face's ``config.json``; missing keys take the defaults of transformers.
        generation_config: Likewise, ``generation_config.json``; may be empty.
        tensors: Under Hugging Face's names without ``model.``.
        text: Tokenizer and chat template.
        name: What people call the model.
        files: Its weight files.

    Raises:
        CheckpointError: If the family is not supported, a value is wrong, or a tensor is missing, unexpected or of the
            wrong shape.
    """
    _refuse_bundled_drafter(config, tensors, name)
    family = _family(config, name)
    full = with_defaults(config, family)
    decoder = read_decoder(full, name)
    backbone = decoder.backbone(full, _layers(family, decoder, name), name)
    stops = _stops(decoder.vocab_size, name, text, config, generation_config)
    own = _one_table(tensors) if decoder.tie_word_embeddings else dict(tensors)
    if not decoder.tie_word_embeddings and "lm_head.weight" not in own:
        raise CheckpointError(f"{name} lacks lm_head.weight, but tie_word_embeddings is false.")
    form = _layer_form(family, decoder)
    check_tensors(own, _shapes(decoder, form), name, _kind(family, form))
    return Target(
        family=family,
        name=name,
        backbone=backbone,
        vocabulary_size=decoder.vocab_size,
        context_length=context_length(full, name),
        stop_token_ids=tuple(sorted(stops)),
        tensors=own,
        text=text,
        files=files,
        notes=(*text.notes, *_vocabulary_notes(text, decoder.vocab_size), _stop_note(stops)),
    )


def _refuse_bundled_drafter(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], name: str) -> None:
    signs = [key for key in (*tensors, *config) if key.startswith("mtp.") or key == "dspark_block_size"]
    if signs:
        raise CheckpointError(
            f"{name}: target and drafter are bundled in one checkpoint ({signs[0]}), as DeepSeek-V4 does; that is not "
            "supported."
        )


def _family(config: Mapping[str, Any], name: str) -> str:
    """The family that ``architectures`` and ``model_type`` name; one of them is enough."""
    architectures = read_architectures(config, name)
    named = {f"architecture {architecture!r}": ARCHITECTURES.get(architecture) for architecture in architectures}
    model_type = config.get("model_type")
    if model_type is not None or not named:
        known = isinstance(model_type, str) and model_type in model_defaults()
        named[f"model_type {model_type!r}"] = model_type if known else None
    for spelling, family in named.items():
        if family is None:
            raise CheckpointError(f"{name}: {spelling} is not supported; supported are {', '.join(ARCHITECTURES)}.")
    if len(set(named.values())) > 1:
        raise CheckpointError(f"{name}: {' contradicts '.join(named)}.")
    return str(next(iter(named.values())))


def _layer_form(family: str, decoder: Decoder) -> LayerForm:
    match family:
        case "llama":
            return LayerForm(False, decoder.attention_bias, decoder.attention_bias, decoder.mlp_bias)
        case "qwen2":
            return LayerForm(qkv_bias=True)
        case "qwen3":
            return LayerForm(True, decoder.attention_bias, decoder.attention_bias)
        case _:
            return LayerForm()


def _kind(family: str, form: LayerForm) -> str:
    biases = {"llama": f" with attention_bias = {form.output_bias} and mlp_bias = {form.mlp_bias}"}
    biases["qwen3"] = f" with attention_bias = {form.output_bias}"
    return f"a {family} model{biases.get(family, '')}"


def _layers(family: str, decoder: Decoder, where: str) -> tuple[Layer, ...]:
    """Llama has no sliding windows and Mistral the same everywhere, whatever their ``layer_types`` say."""
    match family:
        case "llama":
            windows: tuple[int | None, ...] = (None,) * decoder.num_hidden_layers
        case "mistral":
            windows = (decoder.sliding_window,) * decoder.num_hidden_layers
        case _:
            windows = decoder.windows(where)
    return tuple(Layer(window) for window in windows)


def _shapes(decoder: Decoder, form: LayerForm) -> dict[str, tuple[int, ...]]:
    table = (decoder.vocab_size, decoder.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": table, "norm.weight": (decoder.hidden_size,)}
    if not decoder.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    for index in range(decoder.num_hidden_layers):
        shapes |= layer_shapes(decoder, index, form)
    return shapes


def _one_table(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of a tied model, whichever of embedding and LM head its file holds."""
    head = tensors.get("lm_head.weight")
    table = {"embed_tokens.weight": head} if head is not None else {}
    return table | {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


def _stops(vocabulary_size: int, name: str, text: TextAssets, *configs: Mapping[str, Any]) -> dict[int, str]:
    """Every id that ends a text, and why; each configuration has one, a list or none."""
    stops: dict[int, str] = {token: reason for token, reason in text.ends.items() if token < vocabulary_size}
    for config in configs:
        value = config.get("eos_token_id")
        listed = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        for token in listed:
            if type(token) is not int or not 0 <= token < vocabulary_size:
                raise CheckpointError(
                    f"{name}: eos_token_id = {value!r}; ids below the vocabulary size {vocabulary_size} are needed."
                )
            stops[token] = "eos_token_id of the configuration"
    return stops


def _stop_note(stops: Mapping[int, str]) -> str:
    if not stops:
        return "no token is known to end a text: each runs up to its limit"
    return f"texts end at {', '.join(f'{token} ({reason})' for token, reason in sorted(stops.items()))}"


def _vocabulary_notes(text: TextAssets, vocabulary_size: int) -> tuple[str, ...]:
    """Tokens of the tokenizer that the model has no embedding for, those in the chat template first."""
    outside = sorted(
        (t for t, id_ in text.vocabulary.items() if id_ >= vocabulary_size), key=text.vocabulary.__getitem__
    )
    if not outside:
        return ()
    written = [token for token in outside if token in (text.chat_template or "")]
    shown = ", ".join(f"{token!r} = {text.vocabulary[token]}" for token in (written or outside)[:SHOWN_TOKENS])
    which = ", which its chat template writes" if written else ""
    return (
        f"the model has embeddings for {vocabulary_size} tokens; prompts that hold one beyond are refused: "
        f"{shown}{which}",
    )
