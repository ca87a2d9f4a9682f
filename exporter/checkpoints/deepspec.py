"""DSpark and DFlash drafters as DeepSpec, SpecForge and SGLang write them.

``config.json`` is a flat Qwen3 configuration with the drafter's settings, which SpecForge and SGLang nest. Tap ids are
layer outputs, and slot 0 predicts. DeepSpec's own DFlash files are this with rank 0. All layers see the whole block
unless ``is_causal`` says otherwise.

Sources: deepseek-ai/DeepSpec, ``modeling/dspark``; sgl-project/SpecForge, ``modeling/draft``.
"""

from dspark.exporter.checkpoints.blocks import describe_block_drafter
from dspark.exporter.checkpoints.decoder import with_defaults
from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.checkpoints.folder import Folder
from dspark.exporter.checkpoints.spellings import Spellings

__all__ = ["ARCHITECTURES", "read_deepspec"]

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")


def read_deepspec(folder: Folder, target: Target) -> Drafter:
    """Reads a DSpark or DFlash drafter in DeepSpec's layout.

    Raises:
        CheckpointError: See ``describe_block_drafter``.
    """
    settings = Spellings(folder.config, folder.where)
    anchor_predicts = settings.find(bool, "sample_from_anchor")
    return describe_block_drafter(
        folder,
        target,
        settings,
        with_defaults(folder.config, "qwen3"),
        layout="deepspec",
        taps=settings.require(list, "target_layer_ids"),
        block_size=settings.require(int, "block_size"),
        anchor_predicts=True if anchor_predicts is None else anchor_predicts,
        sliding_is_causal=False,
    )
