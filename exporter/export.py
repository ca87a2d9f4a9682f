"""From checkpoints to a bundle that appears whole or not at all."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dspark.configs import DISTRIBUTION, own_version
from dspark.exporter.checkpoints import read_drafter, read_target
from dspark.exporter.checkpoints.description import Backbone, Drafter, DrafterKind, Target
from dspark.exporter.draft_vocabulary import cut_vocabulary, frequent_tokens, limit_choices
from dspark.exporter.errors import CheckpointError, ExportError
from dspark.exporter.graphs import build_block_drafter, build_eagle3_drafter, build_head, build_target
from dspark.exporter.joined import join_projections
from dspark.exporter.output import check_output, written_aside
from dspark.exporter.precision import PrecisionProfile
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.hashing import hash_file
from dspark.runtime.bundle.manifest import (
    MANIFEST,
    CacheForm,
    CacheInfo,
    DrafterInfo,
    FileInfo,
    GraphFiles,
    HeadInfo,
    Manifest,
    PrecisionInfo,
    SourceFile,
    StaticShapes,
    TargetInfo,
    TextInfo,
)
from dspark.runtime.errors import BundleError
from dspark.runtime.text.chat_template import ChatTemplate
from dspark.runtime.text.tokenizer import TextProcessor

__all__ = ["Export", "Static", "export_bundle", "prepare"]

WEIGHTS = "weights.bin"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
DRAFT_VOCABULARY = "draft_vocabulary.npy"
FLOAT32_PROFILE = PrecisionProfile()
CHUNK = 128
FIRST_CAPACITY = 256
"""The shortest cache of fixed shapes by default; each further one is four times as long."""
CAPACITIES = 4


@dataclass(frozen=True)
class Static:
    """Shapes to fix, as far as they are a matter of choice.

    Attributes:
        batch: Requests that run at once.
        chunk: Prompt tokens that a step computes; by default 128, or fewer if texts are shorter.
        capacities: Lengths of the cache in tokens, in any order; by default a few up to the longest text.
    """

    batch: int = 1
    chunk: int | None = None
    capacities: tuple[int, ...] = ()

    def shapes(self, block: int, context_length: int) -> StaticShapes:
        """The shapes for verification steps of ``block`` tokens per request and texts of ``context_length`` tokens.

        Raises:
            ExportError: A number is too small or too large.
        """
        chunk = min(CHUNK, context_length) if self.chunk is None else self.chunk
        ladder = {min(FIRST_CAPACITY << (2 * step), context_length) for step in range(CAPACITIES)}
        capacities = tuple(sorted(set(self.capacities) or ladder))
        for name, size, most in (
            ("batch", self.batch, 1024),
            ("chunk", chunk, context_length),
            *(("cache length", capacity, context_length) for capacity in capacities),
        ):
            if not 1 <= size <= most:
                raise ExportError(f"the static {name} is {size}; it must be from 1 to {most}")
        return StaticShapes(batch=self.batch, block=block, chunk=chunk, capacities=capacities)


@dataclass(frozen=True)
class Export:
    """Checked checkpoints, ready to be written.

    Attributes:
        target: The target.
        drafter: The drafter, if the bundle gets one.
        output: The bundle's folder.
        force: Whether an existing bundle is replaced.
        precision: Of the target's graph.
        draft_precision: Of the drafter's and the head's.
        cache_form: How the target's graph keeps keys and values.
        shapes: Shapes that the bundle fixes; None if it takes any.
    """

    target: Target
    drafter: Drafter | None
    output: Path
    force: bool
    precision: PrecisionProfile = FLOAT32_PROFILE
    draft_precision: PrecisionProfile = FLOAT32_PROFILE
    cache_form: CacheForm = "in-place"
    shapes: StaticShapes | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What its user should know."""
        return self.target.notes if self.drafter is None else (*self.target.notes, *self.drafter.notes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of float32 weights that are read, for a progress bar."""
        tensors = list(self.target.tensors.values())
        if self.drafter is not None:
            tensors += self.drafter.tensors.values()
        return sum(4 * int(np.prod(tensor.shape, dtype=np.int64)) for tensor in tensors)


def prepare(
    target: Path,
    drafter: Path | None,
    output: Path,
    *,
    force: bool = False,
    precision: PrecisionProfile = FLOAT32_PROFILE,
    draft_precision: PrecisionProfile | None = None,
    draft_vocabulary: int | None = None,
    draft_vocabulary_from: Path | None = None,
    draft_top_k: int | None = None,
    cache_form: CacheForm = "in-place",
    static: Static | None = None,
) -> Export:
    """Reads both checkpoints' headers and refuses what cannot work, before anything is written.

    Args:
        target: A Hugging Face folder or a GGUF file.
        drafter: A drafter's folder; without one the bundle decodes plainly.
        output: The bundle's folder.
        force: Whether an existing bundle may be replaced.
        precision: Of the target's graph.
        draft_precision: Of the drafter's graphs; by default the target's.
        draft_vocabulary: Tokens that the drafter may draft; by default all.
        draft_vocabulary_from: Text to take the most frequent ones of, see ``frequent_tokens``.
        draft_top_k: Tokens of each slot, the likeliest before its repair, that the head chooses from; by default all.
        cache_form: How the target's graph keeps keys and values, see ``Manifest``.
        static: Shapes to fix; by default the bundle takes any.

    Raises:
        CheckpointError: A checkpoint is unsupported, damaged, or does not fit its target.
        ExportError: The output exists or cannot be written, or there cannot be such a draft vocabulary.
    """
    output = output.resolve()
    check_output(output, force=force)
    if draft_vocabulary_from is not None and draft_vocabulary is None:
        raise ExportError("--draft-vocabulary-from needs --draft-vocabulary, the number of tokens to keep")
    if draft_vocabulary is not None and drafter is None:
        raise ExportError("--draft-vocabulary needs a drafter; give --drafter")
    described = read_target(target)
    _check_text(described)
    described_drafter = read_drafter(drafter, described) if drafter else None
    if described_drafter is not None and draft_vocabulary is not None:
        tokens = frequent_tokens(draft_vocabulary, described, draft_vocabulary_from)
        described_drafter = cut_vocabulary(described_drafter, described, tokens)
    if draft_top_k is not None:
        described_drafter = limit_choices(described_drafter, draft_top_k)
    block = 1 if described_drafter is None else 1 + described_drafter.draft_length
    shapes = None if static is None else static.shapes(block, described.context_length)
    if shapes is not None and cache_form != "delta":
        raise ExportError("devices that need fixed shapes cannot write caches in place; add --cache-form delta")
    return Export(
        described, described_drafter, output, force, precision, draft_precision or precision, cache_form, shapes
    )


def export_bundle(
    export: Export,
    on_bytes: Callable[[int], None] = lambda count: None,
    compile_graphs: Callable[[Path, Manifest], object] = lambda folder, manifest: None,
) -> Manifest:
    """Writes the bundle aside and moves it into place.

    Args:
        export: What ``prepare`` returned.
        on_bytes: Called with the number of bytes of every piece of weights written.
        compile_graphs: Called with the bundle's folder, before it is moved, and the manifest; adds compiled graphs.

    Returns:
        The manifest.

    Raises:
        ExportError: The bundle cannot be written.
    """
    try:
        with written_aside(export.output, force=export.force) as folder:
            manifest = _write(export, folder, on_bytes)
            compile_graphs(folder, manifest)
            return manifest
    except OSError as error:
        raise ExportError(f"{export.output}: cannot be written: {error}") from error


def _check_text(target: Target) -> None:
    """Refuses a tokenizer or chat template that could not be read when generating."""
    text = target.text
    try:
        if text.tokenizer is not None:
            TextProcessor(text.tokenizer)
        if text.chat_template is not None:
            ChatTemplate(text.chat_template, text.special_tokens)
    except BundleError as error:
        raise CheckpointError(f"{target.name}: {error}") from error


def _write(export: Export, folder: Path, on_bytes: Callable[[int], None]) -> Manifest:
    target, drafter = join_projections(export.target), export.drafter and join_projections(export.drafter)
    profiles = {"target": export.precision, "drafter": export.draft_precision, "head": export.draft_precision}
    encodings = export.draft_precision.encodings()
    with WeightFile(folder / WEIGHTS, on_bytes) as weights:
        own = export.precision.encodings()
        graphs = {"target": build_target(target, drafter, weights, own, export.cache_form)}
        if drafter is not None and drafter.kind is DrafterKind.EAGLE3:
            graphs["drafter"] = build_eagle3_drafter(drafter, target, weights, encodings)
        elif drafter is not None:
            graphs["drafter"] = build_block_drafter(drafter, target, weights, encodings)
            graphs["head"] = build_head(drafter, weights, encodings)
    weights_file = _file_info(folder / WEIGHTS)
    for name, model in graphs.items():
        model.metadata_props[WEIGHTS] = weights_file.sha256  # the graph's hash stands for its weights, too
        ir.save(model, folder / f"{name}.onnx")
    if drafter is not None and drafter.draft_vocabulary is not None:
        np.save(folder / DRAFT_VOCABULARY, drafter.draft_vocabulary, allow_pickle=False)
    text = _write_text(target, folder)
    manifest = Manifest(
        target=_target_info(target),
        drafter=_drafter_info(drafter) if drafter else None,
        head=_head_info(drafter) if drafter and "head" in graphs else None,
        graphs=GraphFiles(**{name: f"{name}.onnx" for name in graphs}),
        text=text,
        precision={name: _precision_info(profiles[name]) for name in graphs},
        cache_form=export.cache_form,
        shapes=export.shapes,
        producer={DISTRIBUTION: own_version(), "onnx-ir": version("onnx-ir")},
        files={
            path.name: weights_file if path.name == WEIGHTS else _file_info(path) for path in sorted(folder.iterdir())
        },
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return manifest


def _file_info(path: Path) -> FileInfo:
    return FileInfo(bytes=path.stat().st_size, sha256=hash_file(path))


def _precision_info(profile: PrecisionProfile) -> PrecisionInfo:
    return PrecisionInfo(linear=profile.linear.value, tables=profile.tables.value, blocks=profile.blocks)


def _target_info(target: Target) -> TargetInfo:
    return TargetInfo(
        family=target.family,
        name=target.name,
        vocabulary_size=target.vocabulary_size,
        hidden_size=target.backbone.hidden_size,
        context_length=target.context_length,
        stop_token_ids=target.stop_token_ids,
        cache=_cache_info(target.backbone),
        rope_lengths=target.backbone.rope.dynamic is not None,
        source=_sources(target.files),
    )


def _drafter_info(drafter: Drafter) -> DrafterInfo:
    return DrafterInfo(
        kind=drafter.kind.value,
        layout=drafter.layout,
        name=drafter.name,
        hidden_size=drafter.backbone.hidden_size,
        taps=drafter.taps,
        block_size=drafter.block_size,
        anchor_predicts=drafter.anchor_predicts,
        draft_length=drafter.draft_length,
        mask_token_id=drafter.mask_token_id,
        vocabulary_size=drafter.vocabulary_size,
        draft_vocabulary=None if drafter.draft_vocabulary is None else DRAFT_VOCABULARY,
        top_k=drafter.top_k,
        cache=_cache_info(drafter.backbone),
        source=_sources(drafter.files),
    )


def _head_info(drafter: Drafter) -> HeadInfo:
    return HeadInfo(kind=drafter.head.value, markov_rank=drafter.markov_rank, confidence=drafter.confidence.value)


def _cache_info(backbone: Backbone) -> CacheInfo:
    return CacheInfo(layers=len(backbone.layers), kv_heads=backbone.kv_head_count, head_dim=backbone.head_dim)


def _sources(files: tuple[Path, ...]) -> tuple[SourceFile, ...]:
    return tuple(SourceFile(name=file.name, bytes=file.stat().st_size, sha256=hash_file(file)) for file in files)


def _write_text(target: Target, folder: Path) -> TextInfo:
    contents = {TOKENIZER: target.text.tokenizer, CHAT_TEMPLATE: target.text.chat_template}
    for name, content in contents.items():
        if content is not None:
            (folder / name).write_text(content, encoding="utf-8")
    return TextInfo(
        tokenizer=TOKENIZER if target.text.tokenizer is not None else None,
        chat_template=CHAT_TEMPLATE if target.text.chat_template is not None else None,
        special_tokens=dict(target.text.special_tokens),
    )
