"""DFlash drafters as z-lab writes them.

Tap ids are layer outputs; slot 0 predicts nothing, so a block of 16 gives 15 proposals; embedding and LM head are the
target's. Layers with a sliding window are causal within the block, the others see all of it, unless ``is_causal`` or
``dflash_config.causal`` says otherwise. Source: z-lab/dflash, ``dflash/model.py``.
"""

from dspark.exporter.checkpoints.blocks import describe_block_drafter
from dspark.exporter.checkpoints.decoder import Decoder, read_decoder, with_defaults
from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.checkpoints.folder import Folder
from dspark.exporter.checkpoints.spellings import Spellings
from dspark.exporter.errors import CheckpointError

__all__ = ["ARCHITECTURES", "read_zlab"]

ARCHITECTURES = ("DFlashDraftModel",)
DEFAULT_BLOCK_SIZE = 16


def read_zlab(folder: Folder, target: Target) -> Drafter:
    """Reads a DFlash drafter in z-lab's layout.

    Raises:
        CheckpointError: See ``describe_block_drafter``.
    """
    settings = Spellings(folder.config, folder.where)
    config = with_defaults(folder.config, "qwen3")
    taps = settings.find(list, "target_layer_ids")
    block_size = settings.find(int, "block_size")
    return describe_block_drafter(
        folder,
        target,
        settings,
        config,
        layout="z-lab",
        taps=_spread_taps(read_decoder(config, folder.where), target, folder.where) if taps is None else taps,
        block_size=DEFAULT_BLOCK_SIZE if block_size is None else block_size,
        anchor_predicts=settings.find(bool, "sample_from_anchor") or False,
        sliding_is_causal=True,
    )


def _spread_taps(decoder: Decoder, target: Target, where: str) -> list[int]:
    """Where no taps are named: as many as there are draft layers, spread from layer 1 to N − 3."""
    layers, taps = len(target.backbone.layers), decoder.num_hidden_layers
    if layers < 4:
        raise CheckpointError(f"{where} lacks target_layer_ids, and {layers} target layers are too few to spread taps.")
    return [layers // 2] if taps == 1 else [round(1 + index * (layers - 4) / (taps - 1)) for index in range(taps)]
