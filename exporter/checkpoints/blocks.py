"""DSpark and DFlash drafters: what their layouts have in common.

The layouts differ in names and conventions, which their readers undo; layers, heads and tensors are always those of
DeepSpec's ``Qwen3DSparkModel``.
"""

from collections.abc import Mapping
from typing import Any

from dspark.exporter.checkpoints.agreement import MOST_DRAFT_TOKENS, check_fc_width, check_taps, check_target
from dspark.exporter.checkpoints.decoder import Decoder, LayerForm, check_tensors, layer_shapes, read_decoder
from dspark.exporter.checkpoints.description import ConfidenceInput, Drafter, DrafterKind, HeadKind, Layer, Target
from dspark.exporter.checkpoints.folder import Folder
from dspark.exporter.checkpoints.spellings import Spellings
from dspark.exporter.checkpoints.vocabulary import VOCABULARY_TABLES, borrowed_tensors, read_draft_vocabulary
from dspark.exporter.errors import CheckpointError

__all__ = ["describe_block_drafter"]

# Settings of other block drafters, and the values with which they change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "conv_kernel_size": (0,),
    "final_logit_softcapping": (0,),
    "input_embedding_scale": (1,),
    "logit_scale": (1,),
    "output_multiplier": (1,),
    "projector_type": ("dflash", "dspark"),
    "selector_rank": (0,),
    "shift_label": (False,),
    "use_swa": (False,),
}


def describe_block_drafter(
    folder: Folder,
    target: Target,
    settings: Spellings,
    decoder_config: Mapping[str, Any],
    *,
    layout: str,
    taps: list[Any],
    block_size: int,
    anchor_predicts: bool,
    sliding_is_causal: bool,
) -> Drafter:
    """Describes a DSpark or DFlash drafter and checks it against its target.

    Args:
        folder: The checkpoint.
        target: What it drafts for.
        settings: Looks up what all layouts spell alike.
        decoder_config: Describes the draft layers, defaults filled in.
        layout: The layout's name.
        taps: Layer outputs of the target.
        block_size: Slots of a block.
        anchor_predicts: Whether slot 0 proposes a token.
        sliding_is_causal: Whether layers with a sliding window are causal within the block when ``is_causal`` and
            ``causal`` do not say; layers without one are not.

    Raises:
        CheckpointError: If a setting is wrong or not supported, does not fit the target, or contradicts the tensors.
    """
    where = settings.where
    settings.refuse(UNSUPPORTED)
    decoder = read_decoder(decoder_config, where)
    if decoder.hidden_size != target.backbone.hidden_size:
        raise CheckpointError(
            f"{where}: hidden_size = {decoder.hidden_size}, but that of the target {target.name} is "
            f"{target.backbone.hidden_size}."
        )
    check_target(settings, decoder, target)
    checked_taps = check_taps(taps, target, where)
    proposals = block_size if anchor_predicts else block_size - 1
    if not 1 <= proposals <= MOST_DRAFT_TOKENS:
        raise CheckpointError(
            f"{where}: block_size = {block_size} makes {proposals} draft tokens; 1 to {MOST_DRAFT_TOKENS} are allowed."
        )
    mask_token_id = _mask_token_id(settings, target)
    rank = settings.find(int, "markov_rank") or 0
    head = _head(settings, rank)
    confidence = _confidence(settings, rank)
    causal = settings.find(bool, "is_causal", "causal")
    layers = tuple(
        Layer(window, causal=(sliding_is_causal and window is not None) if causal is None else causal)
        for window in decoder.windows(where)
    )
    backbone = decoder.backbone(decoder_config, layers, where)
    tensors = {name: tensor for name, tensor in folder.tensors.items() if name not in VOCABULARY_TABLES}
    check_fc_width(tensors.get("fc.weight"), checked_taps, target, where)
    vocabulary = read_draft_vocabulary(folder.tensors, settings.find(int, "draft_vocab_size"), target, where)
    draft_size = target.vocabulary_size if vocabulary is None else len(vocabulary)
    shapes = _backbone_shapes(decoder, len(checked_taps), draft_size)
    shapes |= _head_shapes(head, rank, decoder, draft_size) | _confidence_shapes(confidence, rank, decoder.hidden_size)
    kind = f"a drafter with markov_head_type {head}, markov_rank {rank} and confidence input {confidence}"
    check_tensors(tensors, shapes, str(folder.path), kind, borrowed=borrowed_tensors(vocabulary))
    return Drafter(
        kind=DrafterKind.DFLASH if (head, confidence) == (HeadKind.NONE, ConfidenceInput.NONE) else DrafterKind.DSPARK,
        layout=layout,
        name=folder.name,
        backbone=backbone,
        taps=checked_taps,
        block_size=block_size,
        anchor_predicts=anchor_predicts,
        mask_token_id=mask_token_id,
        head=head,
        markov_rank=rank,
        confidence=confidence,
        vocabulary_size=draft_size,
        draft_vocabulary=vocabulary,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        tensors=tensors,
        files=folder.files,
        notes=folder.notes,
    )


def _mask_token_id(settings: Spellings, target: Target) -> int:
    token = settings.require(int, "mask_token_id", "noise_token_id")
    if not 0 <= token < target.vocabulary_size:
        raise CheckpointError(
            f"{settings.where}: mask_token_id = {token} is outside the target's vocabulary of {target.vocabulary_size}."
        )
    return token


def _head(settings: Spellings, rank: int) -> HeadKind:
    if rank < 0:
        raise CheckpointError(f"{settings.where}: markov_rank = {rank}; 0 or more is needed.")
    if rank == 0:
        return HeadKind.NONE
    name = settings.find(str, "markov_head_type") or HeadKind.VANILLA
    kinds = [kind for kind in HeadKind if kind is not HeadKind.NONE]
    if name not in kinds:
        raise CheckpointError(f"{settings.where}: markov_head_type = {name!r}; supported are {', '.join(kinds)}.")
    return HeadKind(name)


def _confidence(settings: Spellings, rank: int) -> ConfidenceInput:
    with_markov = settings.find(bool, "confidence_head_with_markov")
    if with_markov and rank == 0:
        raise CheckpointError(
            f"{settings.where}: confidence_head_with_markov = True needs a Markov head, but markov_rank is 0."
        )
    if not settings.find(bool, "enable_confidence_head"):
        return ConfidenceInput.NONE
    if with_markov is None:
        raise CheckpointError(f"{settings.where} lacks confidence_head_with_markov, needed for its confidence head.")
    return ConfidenceInput.HIDDEN_AND_MARKOV if with_markov else ConfidenceInput.HIDDEN


def _backbone_shapes(decoder: Decoder, tap_count: int, draft_size: int) -> dict[str, tuple[int, ...]]:
    hidden = decoder.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (decoder.vocab_size, hidden),
        "lm_head.weight": (draft_size, hidden),
        "fc.weight": (hidden, tap_count * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    form = LayerForm(qk_norm=True, qkv_bias=decoder.attention_bias, output_bias=decoder.attention_bias)
    for index in range(decoder.num_hidden_layers):
        shapes |= layer_shapes(decoder, index, form)
    return shapes


def _head_shapes(head: HeadKind, rank: int, decoder: Decoder, draft_size: int) -> dict[str, tuple[int, ...]]:
    """The first factor embeds target ids, the second gives a bias for each draft id."""
    if head is HeadKind.NONE:
        return {}
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (decoder.vocab_size, rank),
        "markov_head.markov_w2.weight": (draft_size, rank),
    }
    if head is HeadKind.GATED:
        shapes["markov_head.gate_proj.weight"] = (rank, decoder.hidden_size + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if head is HeadKind.RNN:
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + decoder.hidden_size)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    return shapes


def _confidence_shapes(confidence: ConfidenceInput, rank: int, hidden: int) -> dict[str, tuple[int, ...]]:
    if confidence is ConfidenceInput.NONE:
        return {}
    inputs = hidden + rank if confidence is ConfidenceInput.HIDDEN_AND_MARKOV else hidden
    return {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
