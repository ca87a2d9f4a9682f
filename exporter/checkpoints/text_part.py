"""The text part of a multimodal checkpoint, as the text model that it is."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dspark.configs import model_defaults
from dspark.exporter.checkpoints.folder import Folder, check_unquantised
from dspark.exporter.checkpoints.tensors import FileTensor
from dspark.exporter.errors import CheckpointError

__all__ = ["text_part"]

NESTED = "text_config"
PREFIXES = ("language_model.", "text_model.")
TEXT_MODULES = ("embed_tokens", "layers", "lm_head", "norm")


def text_part(folder: Folder) -> Folder:
    """A checkpoint without what is not text, its configuration and its tensors' names as those of a text model.

    Args:
        folder: Any checkpoint; one of a text model comes back as it is.

    Raises:
        CheckpointError: The text part is of an unsupported family or quantised, or a tensor is there twice.
    """
    prefixed = any(name.startswith(PREFIXES) for name in folder.tensors)
    if NESTED not in folder.config and not prefixed:
        return folder
    config = _text_config(folder) if NESTED in folder.config else folder.config
    tensors: dict[str, FileTensor] = {}
    others: Counter[str] = Counter()
    for stored, tensor in folder.tensors.items():
        name = _text_name(stored, prefixed)
        if name is None:
            others[stored.partition(".")[0]] += 1
        elif name in tensors:
            raise CheckpointError(f"{folder.path} has {name} twice, in and outside of its text part.")
        else:
            tensors[name] = tensor
    left = ", ".join(f"{module} ({count} tensors)" for module, count in sorted(others.items()))
    note = (
        f"{folder.path} is a multimodal model, of which only the text part is exported; left out: {left or 'nothing'}"
    )
    return replace(folder, config=config, tensors=tensors, notes=(*folder.notes, note))


def _text_name(stored: str, prefixed: bool) -> str | None:
    """A tensor's name in the text model; None if it belongs to another part."""
    for prefix in PREFIXES:
        if stored.startswith(prefix):
            return stored.removeprefix(prefix).removeprefix("model.")
    modules = ("lm_head",) if prefixed else TEXT_MODULES
    return stored if stored.partition(".")[0] in modules else None


def _text_config(folder: Folder) -> dict[str, Any]:
    nested = folder.config[NESTED]
    where = f"{folder.where}: {NESTED}"
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{where} = {nested!r}; an object is needed.")
    check_unquantised(nested, where)
    model_type = nested.get("model_type")
    if model_type not in model_defaults():
        raise CheckpointError(
            f"{where}: the text part of {', '.join(folder.architectures) or 'this model'} has the model_type "
            f"{model_type!r}, which is not supported; supported are {', '.join(model_defaults())}."
        )
    ends = [token for config in (folder.config, nested) for token in _listed(config.get("eos_token_id"))]
    tied = nested.get("tie_word_embeddings", folder.config.get("tie_word_embeddings"))
    return {**nested, "eos_token_id": ends, "tie_word_embeddings": tied}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
