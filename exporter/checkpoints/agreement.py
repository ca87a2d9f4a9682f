"""What a drafter's configuration must agree on with its target, whatever its layout."""

from collections.abc import Sequence

from dspark.exporter.checkpoints.decoder import Decoder
from dspark.exporter.checkpoints.description import Target
from dspark.exporter.checkpoints.spellings import Spellings
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.errors import CheckpointError

__all__ = ["MOST_DRAFT_TOKENS", "check_fc_width", "check_taps", "check_target", "default_eagle_taps"]

MOST_DRAFT_TOKENS = 256
"""Graphs are unrolled over the draft; published drafters have 5 to 16."""

EMBEDDING_OUTPUT = -1


def check_target(settings: Spellings, decoder: Decoder, target: Target) -> None:
    """Checks that a drafter was made for a target of this depth, width and vocabulary.

    Raises:
        CheckpointError: Names both values.
    """
    layers, width = settings.find(int, "num_target_layers"), settings.find(int, "target_hidden_size")
    pairs = {
        "num_target_layers": (layers, len(target.backbone.layers), "number of layers"),
        "target_hidden_size": (width, target.backbone.hidden_size, "hidden size"),
        "vocab_size": (decoder.vocab_size, target.vocabulary_size, "vocabulary size"),
    }
    for key, (drafter, own, what) in pairs.items():
        if drafter is not None and drafter != own:
            raise CheckpointError(
                f"{settings.where}: {key} = {drafter}, but the {what} of the target {target.name} is {own}."
            )


def check_taps(taps: Sequence[object], target: Target, where: str) -> tuple[int, ...]:
    """Checks tap ids given as layer outputs (−1 is the embedding output).

    Raises:
        CheckpointError: If there are none, one is out of range or no whole number, they do not increase, or one is the
            target's last layer: Hugging Face hands out its output after the final norm, drafters are trained on the one
            before.
    """
    last = len(target.backbone.layers) - 1
    if not taps:
        raise CheckpointError(f"{where}: the list of tap layers is empty.")
    checked: list[int] = []
    for tap in taps:
        if type(tap) is not int:
            raise CheckpointError(f"{where}: tap layers {list(taps)}; whole numbers are needed.")
        if tap == last:
            raise CheckpointError(
                f"{where}: a tap on the output of layer {tap}, the last of the target {target.name}; an earlier layer "
                "is needed."
            )
        if not EMBEDDING_OUTPUT <= tap < last:
            raise CheckpointError(
                f"{where}: a tap on the output of layer {tap} is out of range; the target {target.name} has the layers "
                f"0 to {last}, and -1 is its embedding."
            )
        if checked and tap <= checked[-1]:
            raise CheckpointError(f"{where}: tap layers {list(taps)} must be increasing.")
        checked.append(tap)
    return tuple(checked)


def check_fc_width(fc: LazyTensor | None, taps: tuple[int, ...], target: Target, where: str) -> None:
    """Checks that ``fc`` reads exactly the taps.

    Raises:
        CheckpointError: If it is missing or of another width.
    """
    if fc is None:
        raise CheckpointError(f"{where}: the checkpoint lacks fc.weight.")
    hidden = target.backbone.hidden_size
    if len(fc.shape) != 2 or fc.shape[1] != len(taps) * hidden:
        raise CheckpointError(
            f"{where}: fc.weight has the shape {list(fc.shape)}, but {len(taps)} taps of the target's hidden size "
            f"{hidden} are {len(taps) * hidden} wide."
        )


def default_eagle_taps(target: Target) -> list[int]:
    """The layer outputs that EAGLE-3 reads unless told otherwise.

    They are the inputs of layers 2, N/2 and N − 3 (SafeAILab/EAGLE, vLLM and SGLang record them before the layer runs),
    so the outputs of the layers before those.
    """
    count = len(target.backbone.layers)
    return [layer - 1 for layer in (2, count // 2, count - 3)]
