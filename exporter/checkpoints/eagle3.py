"""EAGLE-3 drafters: DeepSpec's layout, that of the first ones, and what they share with speculators'.

Tap ids come in two conventions. ``target_layer_ids`` (DeepSpec) and ``eagle_config.eagle_aux_hidden_state_layer_ids``
(SpecForge, SGLang) are layer outputs; SGLang adds one because it records what goes into a layer. At top level (vLLM,
speculators) ``eagle_aux_hidden_state_layer_ids`` are the layers whose *input* is read: layer outputs + 1. Both mean the
same by default: for a target of 94 layers SpecForge writes 1, 46, 90, and vLLM takes 2, 47, 91.

Sources: deepseek-ai/DeepSpec, ``modeling/eagle3``; sgl-project/SpecForge, ``configs``; sgl-project/sglang,
``models/llama.py``; vllm-project/vllm, ``spec_decode/eagle``. Li et al., "EAGLE-3", 2025.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dspark.configs import model_defaults
from dspark.exporter.checkpoints.agreement import (
    MOST_DRAFT_TOKENS,
    check_fc_width,
    check_taps,
    check_target,
    default_eagle_taps,
)
from dspark.exporter.checkpoints.decoder import (
    Decoder,
    LayerForm,
    check_tensors,
    layer_shapes,
    read_decoder,
    with_defaults,
)
from dspark.exporter.checkpoints.description import ConfidenceInput, Drafter, DrafterKind, HeadKind, Layer, Target
from dspark.exporter.checkpoints.folder import Folder
from dspark.exporter.checkpoints.spellings import Spellings
from dspark.exporter.checkpoints.tensors import FileTensor
from dspark.exporter.checkpoints.vocabulary import VOCABULARY_TABLES, borrowed_tensors, read_draft_vocabulary
from dspark.exporter.errors import CheckpointError

__all__ = [
    "ARCHITECTURES",
    "DEEPSPEC_ARCHITECTURES",
    "DEFAULT_STEPS",
    "describe_eagle3",
    "is_legacy_eagle3",
    "read_deepspec_eagle3",
    "read_legacy_eagle3",
]

DEEPSPEC_ARCHITECTURES = ("Qwen3Eagle3Model",)
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
DEFAULT_STEPS = 5  # the default of speculators' converter

# Settings of later or other EAGLE heads, and the values with which they change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_scale": (1,),
    "parallel_draft_step": (1,),
    "use_aux_hidden_state": (True,),
    "use_mtp_layernorm": (False,),
}


def read_deepspec_eagle3(folder: Folder, target: Target) -> Drafter:
    """Reads an EAGLE-3 drafter in DeepSpec's layout.

    Raises:
        CheckpointError: See ``describe_eagle3``.
    """
    settings = _settings(folder)
    layers = settings.require(int, "num_hidden_layers", "draft_num_hidden_layers")
    return describe_eagle3(
        folder,
        target,
        settings,
        with_defaults({**folder.config, "num_hidden_layers": layers}, "qwen3"),
        layout="deepspec",
        taps=settings.require(list, "target_layer_ids"),
        steps=settings.require(int, "ttt_length"),
    )


def is_legacy_eagle3(folder: Folder) -> bool:
    """Whether a checkpoint is an EAGLE-3 drafter of the first layout, which has no architecture name of its own."""
    return (
        any(name in ARCHITECTURES for name in folder.architectures)
        or any(key in folder.config for key in ("draft_vocab_size", "eagle_config"))
        or any(name.startswith("midlayer.") for name in folder.tensors)
    )


def read_legacy_eagle3(folder: Folder, target: Target) -> Drafter:
    """Reads an EAGLE-3 drafter in the layout of the first ones, whose only layer is called ``midlayer``.

    Raises:
        CheckpointError: See ``describe_eagle3``.
    """
    settings = _settings(folder)
    model_type = settings.find(str, "model_type")
    steps = settings.find(int, "ttt_length")
    return describe_eagle3(
        replace(folder, tensors=_renamed(folder)),
        target,
        settings,
        with_defaults(folder.config, model_type if model_type and model_type in model_defaults() else "llama"),
        layout="eagle3",
        taps=_legacy_taps(settings, target),
        steps=DEFAULT_STEPS if steps is None else steps,
    )


def describe_eagle3(
    folder: Folder,
    target: Target,
    settings: Spellings,
    decoder_config: Mapping[str, Any],
    *,
    layout: str,
    taps: list[Any],
    steps: int,
) -> Drafter:
    """Describes an EAGLE-3 drafter and checks it against its target.

    Args:
        folder: The checkpoint, its first layer called ``layers.0``.
        target: What it drafts for.
        settings: Looks up what all layouts spell alike.
        decoder_config: Describes the draft layers, defaults filled in.
        layout: The layout's name.
        taps: Layer outputs of the target.
        steps: Tokens it drafts.

    Raises:
        CheckpointError: If a setting is wrong or not supported, does not fit the target, or contradicts the tensors.
    """
    where = settings.where
    settings.refuse(UNSUPPORTED)
    decoder = read_decoder(decoder_config, where)
    check_target(settings, decoder, target)
    checked_taps = check_taps(taps, target, where)
    if not 1 <= steps <= MOST_DRAFT_TOKENS:
        raise CheckpointError(f"{where}: {steps} draft steps; 1 to {MOST_DRAFT_TOKENS} are supported.")
    norm_before_fc = settings.find(bool, "norm_before_fc") or False
    fc_norm = settings.find(bool, "fc_norm") or False
    if norm_before_fc and fc_norm:
        raise CheckpointError(f"{where}: norm_before_fc and fc_norm exclude each other.")
    windows = decoder.windows(where) if decoder.layer_types else (None,) * decoder.num_hidden_layers
    backbone = decoder.backbone(decoder_config, tuple(Layer(window) for window in windows), where)
    tensors = {name: tensor for name, tensor in folder.tensors.items() if name not in VOCABULARY_TABLES}
    check_fc_width(tensors.get("fc.weight"), checked_taps, target, where)
    vocabulary = read_draft_vocabulary(folder.tensors, settings.find(int, "draft_vocab_size"), target, where)
    _check_borrowing(tensors, decoder, target, where)
    draft_size = target.vocabulary_size if vocabulary is None else len(vocabulary)
    shapes = _layer_shapes(decoder, tensors) | _frame_shapes(decoder, len(checked_taps), target, draft_size)
    if norm_before_fc:
        shapes["input_norm.weight"] = (len(checked_taps) * target.backbone.hidden_size,)
    if fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (target.backbone.hidden_size,) for index in range(len(checked_taps))}
    kind = f"an EAGLE-3 drafter with norm_before_fc = {norm_before_fc} and fc_norm = {fc_norm}"
    check_tensors(tensors, shapes, str(folder.path), kind, borrowed=borrowed_tensors(vocabulary))
    return Drafter(
        kind=DrafterKind.EAGLE3,
        layout=layout,
        name=folder.name,
        backbone=backbone,
        taps=checked_taps,
        block_size=steps,
        anchor_predicts=True,
        mask_token_id=None,
        head=HeadKind.NONE,
        markov_rank=0,
        confidence=ConfidenceInput.NONE,
        vocabulary_size=draft_size,
        draft_vocabulary=vocabulary,
        norm_before_residual=settings.find(bool, "norm_before_residual") or False,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=settings.find(bool, "norm_output") or False,
        tensors=tensors,
        files=folder.files,
        notes=folder.notes,
    )


def _settings(folder: Folder) -> Spellings:
    return Spellings(folder.config, folder.where, nested=("eagle_config",), prefix="")


def _renamed(folder: Folder) -> dict[str, FileTensor]:
    renamed: dict[str, FileTensor] = {}
    for stored, tensor in folder.tensors.items():
        name = f"layers.0.{stored.removeprefix('midlayer.')}" if stored.startswith("midlayer.") else stored
        if name in renamed:
            raise CheckpointError(f"{folder.path} has {name} twice, once as a part of midlayer.")
        renamed[name] = tensor
    return renamed


def _legacy_taps(settings: Spellings, target: Target) -> list[Any]:
    """Tap ids as layer outputs, from whichever spellings are there."""
    key = "eagle_aux_hidden_state_layer_ids"
    top, nested = replace(settings, nested=()), replace(settings, config=settings.config.get("eagle_config") or {})
    spelled = {
        "target_layer_ids": (settings.find(list, "target_layer_ids"), 0),
        f"eagle_config.{key}": (nested.find(list, key), 0),
        key: (top.find(list, key), 1),
    }
    found = {
        spelling: [index - offset if type(index) is int else index for index in ids]
        for spelling, (ids, offset) in spelled.items()
        if ids
    }
    first, *others = found or [""]
    for other in others:
        if found[other] != found[first]:
            raise CheckpointError(
                f"{settings.where}: {first} taps the layer outputs {found[first]}, which contradicts {other}, "
                f"{found[other]}."
            )
    return found.get(first) or default_eagle_taps(target)


def _check_borrowing(tensors: Mapping[str, FileTensor], decoder: Decoder, target: Target, where: str) -> None:
    """Only a drafter as wide as its target can use the target's embedding and LM head."""
    missing = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in tensors]
    if missing and decoder.hidden_size != target.backbone.hidden_size:
        raise CheckpointError(
            f"{where}: hidden_size = {decoder.hidden_size}, but {missing[0]} is the target's, which is "
            f"{target.backbone.hidden_size} wide; the drafter needs its own."
        )
    if decoder.tie_word_embeddings and missing == ["lm_head.weight"]:
        raise CheckpointError(f"{where}: tie_word_embeddings = True with the drafter's own embedding is not supported.")


def _frame_shapes(decoder: Decoder, tap_count: int, target: Target, draft_size: int) -> dict[str, tuple[int, ...]]:
    hidden = decoder.hidden_size
    return {
        "embed_tokens.weight": (decoder.vocab_size, hidden),
        "lm_head.weight": (draft_size, hidden),
        "fc.weight": (hidden, tap_count * target.backbone.hidden_size),
        "norm.weight": (hidden,),
    }


def _layer_shapes(decoder: Decoder, tensors: Mapping[str, FileTensor]) -> dict[str, tuple[int, ...]]:
    """The first layer reads token and feature side by side, the others are ordinary.

    Biases and QK-norm are as the first layer has them: early checkpoints carry their target's configuration, which does
    not say.
    """
    form = LayerForm(
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="layers.0.mlp.gate_proj.bias" in tensors,
    )
    shapes = layer_shapes(decoder, 0, form, attention_inputs=2 * decoder.hidden_size)
    shapes["layers.0.hidden_norm.weight"] = (decoder.hidden_size,)
    for index in range(1, decoder.num_hidden_layers):
        shapes |= layer_shapes(decoder, index, form)
    return shapes
