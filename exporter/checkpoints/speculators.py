"""Drafters as the speculators library writes them.

``speculators_model_type`` names the kind, ``transformer_layer_config`` the layers as a difference from their class's
defaults. Tap ids are vLLM's, indices into Hugging Face's ``hidden_states``: layer outputs + 1, for EAGLE-3 as for the
block drafters. Whether slot 0 predicts is ``sample_from_anchor``; files from before it was written predict from slot 1.
Windows are counted from each slot, as vLLM serves these drafters; training counted them from the anchor.
Layers with a window are causal within the block if ``sliding_window_non_causal`` is false; files without it are older
than causal windows (vLLM reads them so, too). Layers without a window never are.

Sources: vllm-project/speculators 0.9, ``models/{dflash,dspark,eagle3}``; vllm-project/vllm, ``qwen3_dflash.py``.
"""

from dataclasses import replace
from typing import Any

from pydantic import Field, PositiveInt

from dspark.configs import model_defaults
from dspark.exporter.checkpoints.agreement import default_eagle_taps
from dspark.exporter.checkpoints.blocks import describe_block_drafter
from dspark.exporter.checkpoints.decoder import with_defaults
from dspark.exporter.checkpoints.description import Drafter, Target
from dspark.exporter.checkpoints.eagle3 import DEFAULT_STEPS, describe_eagle3
from dspark.exporter.checkpoints.folder import Folder
from dspark.exporter.checkpoints.spellings import Spellings
from dspark.exporter.checkpoints.validation import ConfigModel, validated
from dspark.exporter.errors import CheckpointError

__all__ = ["read_speculators"]

BLOCK_KINDS = ("dspark", "dflash")
KINDS = (*BLOCK_KINDS, "eagle3")


def read_speculators(folder: Folder, target: Target) -> Drafter:
    """Reads a DSpark, DFlash or EAGLE-3 drafter in the layout of speculators.

    Raises:
        CheckpointError: If it is of another kind, and as ``describe_block_drafter`` and ``describe_eagle3``.
    """
    kind = folder.config["speculators_model_type"]
    if kind not in KINDS:
        raise CheckpointError(
            f"{folder.where}: speculators_model_type = {kind!r} is not supported; supported are {', '.join(KINDS)}."
        )
    settings = Spellings(folder.config, folder.where, nested=(), prefix="")
    folder = _without_verifier(folder)
    if kind in BLOCK_KINDS:
        return describe_block_drafter(
            folder,
            target,
            settings,
            _layer_config(folder),
            layout="speculators",
            taps=_taps(settings, target, "aux_hidden_state_layer_ids"),
            block_size=settings.require(int, "block_size"),
            anchor_predicts=settings.find(bool, "sample_from_anchor") or False,
            sliding_is_causal=settings.find(bool, "sliding_window_non_causal") is False,
        )
    return describe_eagle3(
        folder,
        target,
        settings,
        _layer_config(folder),
        layout="speculators",
        taps=_taps(settings, target, "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"),
        steps=_speculative_tokens(folder),
    )


def _without_verifier(folder: Folder) -> Folder:
    """Without the copies of the target's tensors that training needs (``verifier_norm``, ``verifier_lm_head``)."""
    own = {name: tensor for name, tensor in folder.tensors.items() if not name.startswith("verifier")}
    return replace(folder, tensors=own)


def _layer_config(folder: Folder) -> dict[str, Any]:
    where = f"{folder.where}: transformer_layer_config"
    config = folder.config.get("transformer_layer_config")
    if not isinstance(config, dict):
        raise CheckpointError(f"{where} = {config!r}; an object is needed.")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in model_defaults():
        raise CheckpointError(f"{where}.model_type = {model_type!r}; supported are {', '.join(model_defaults())}.")
    return with_defaults(config, model_type)


def _taps(settings: Spellings, target: Target, *names: str) -> list[Any]:
    ids = settings.find(list, *names)
    if ids is None:
        return default_eagle_taps(target)
    return [index - 1 if type(index) is int else index for index in ids]


class _Method(ConfigModel):
    proposal_type: str | None = None
    speculative_tokens: PositiveInt | None = None


class _Proposals(ConfigModel):
    default_proposal_method: str | None = None
    proposal_methods: list[_Method] = Field(default_factory=list)


def _speculative_tokens(folder: Folder) -> int:
    """The steps of the default proposal method."""
    content = folder.config.get("speculators_config") or {}
    proposals = validated(_Proposals, content, f"{folder.where}: speculators_config")
    methods = proposals.proposal_methods
    chosen = [method for method in methods if method.proposal_type == proposals.default_proposal_method] or methods
    return (chosen[0].speculative_tokens if chosen else None) or DEFAULT_STEPS
