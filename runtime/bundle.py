"""The bundle: a folder that can be copied, hashed and read with nothing but the runtime.

The manifest's models are written by the exporter and read here; they are the one definition of the format.
"""

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from dspark.providers.engine_key import ENGINES, EngineKey
from dspark.runtime.errors import BundleError
from dspark.runtime.versioned_file import read_versioned

__all__ = [
    "MANIFEST",
    "SCHEMA_VERSION",
    "BlocksInfo",
    "Bundle",
    "CacheForm",
    "CacheInfo",
    "DrafterInfo",
    "FileInfo",
    "GraphFiles",
    "HeadInfo",
    "Manifest",
    "PrecisionInfo",
    "SourceFile",
    "StaticShapes",
    "TargetInfo",
    "TextInfo",
    "hash_file",
]

MANIFEST = "manifest.json"
SCHEMA_VERSION = 5
LONGEST_NAME = 255
HASHED_ALWAYS = 1 << 30
"""Bytes: smaller files are hashed at every load (well under a second), larger ones when asked."""


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise ValueError(f"{name!r} leaves the bundle's folder")
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(f"{name[:20]!r}… is longer than a file name can be")
    return name


FileName = Annotated[str, AfterValidator(_inside)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceFile(_Model):
    """A checkpoint file that the bundle was made from."""

    name: str
    bytes: int
    sha256: str


class CacheInfo(_Model):
    """Cache rows of a model: ``[B, kv_heads, tokens, head_dim]``, keys and values, a layer."""

    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)


class TargetInfo(_Model):
    """The target model.

    Attributes:
        context_length: Longest text in tokens, prompt and output together.
        rope_lengths: Whether the graph takes ``rope_lengths`` (dynamic NTK scaling).
    """

    family: str
    name: str
    vocabulary_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    context_length: int = Field(ge=2)
    stop_token_ids: tuple[int, ...]
    cache: CacheInfo
    rope_lengths: bool
    source: tuple[SourceFile, ...]


class DrafterInfo(_Model):
    """The drafter.

    Attributes:
        taps: Layer outputs of the target; −1 is the embedding output.
        block_size: Slots of a block.
        anchor_predicts: Whether the anchor's slot proposes a token.
        draft_length: Tokens a draft proposes (γ).
        vocabulary_size: Width of the draft logits.
        draft_vocabulary: File with the target id of every draft id (``.npy``, int64); None when they are the same.
        top_k: Draft ids of each slot that logits are of; None when they are of all.
    """

    kind: Literal["dspark", "dflash", "eagle3"]
    layout: str
    name: str
    hidden_size: int = Field(ge=1)
    taps: tuple[int, ...]
    block_size: int = Field(ge=1)
    anchor_predicts: bool
    draft_length: int = Field(ge=1)
    mask_token_id: int | None
    vocabulary_size: int = Field(ge=1)
    draft_vocabulary: FileName | None
    top_k: int | None = Field(default=None, ge=1)
    cache: CacheInfo
    source: tuple[SourceFile, ...]

    @property
    def choices(self) -> int:
        """Tokens that a draft token is drawn from (K)."""
        return self.vocabulary_size if self.top_k is None else self.top_k


class HeadInfo(_Model):
    """The sequential and the confidence head."""

    kind: Literal["none", "vanilla", "gated", "rnn"]
    markov_rank: int
    confidence: Literal["none", "hidden", "hidden_and_markov"]


class GraphFiles(_Model):
    """The graphs' files; an EAGLE-3 drafter samples itself and has no head."""

    target: FileName
    drafter: FileName | None = None
    head: FileName | None = None


PrecisionName = Literal["fp32", "fp16", "bf16", "int8", "int8-blocks", "int8-weights", "int4"]


CacheForm = Literal["in-place", "delta"]


class BlocksInfo(_Model):
    """How weights are cut into blocks, and how precise their products are (ONNX Runtime's MatMulNBits)."""

    size: int = Field(ge=16)
    accuracy_level: int = Field(ge=0, le=4)


class PrecisionInfo(_Model):
    """Precisions of one graph.

    Attributes:
        linear: Of the linear layers.
        tables: Of embedding and LM head.
        blocks: Set if weights lie in blocks.
    """

    linear: PrecisionName
    tables: PrecisionName
    blocks: BlocksInfo | None = None

    def __str__(self) -> str:
        return self.linear if self.tables == self.linear else f"{self.linear} (embedding and LM head {self.tables})"


class StaticShapes(_Model):
    """Shapes that a bundle fixes, for devices that compile each shape.

    Attributes:
        batch: Requests of a verification step.
        block: Tokens of each of them.
        chunk: Tokens of a prefill step, which is for one request.
        capacities: Lengths of the cache in tokens, ascending; a text moves up from one to the next.
    """

    batch: int = Field(ge=1)
    block: int = Field(ge=1)
    chunk: int = Field(ge=1)
    capacities: tuple[int, ...] = Field(min_length=1)

    @field_validator("capacities")
    @classmethod
    def _ascending(cls, capacities: tuple[int, ...]) -> tuple[int, ...]:
        if capacities[0] < 1 or any(longer <= shorter for shorter, longer in pairwise(capacities)):
            raise ValueError(f"{list(capacities)} are not ascending lengths")
        return capacities


class TextInfo(_Model):
    """Files that turn text into ids and back; None when the checkpoint had none."""

    tokenizer: FileName | None
    chat_template: FileName | None
    special_tokens: dict[str, str]


class FileInfo(_Model):
    """Size and hash of a file in the bundle."""

    bytes: int
    sha256: str


class Manifest(_Model):
    """``manifest.json``.

    Attributes:
        precision: Precisions of each graph.
        cache_form: How the target's graph keeps keys and values. ``in-place``: it writes new rows into the cache that
            it reads. ``delta``: it returns new rows only, for devices that cannot write in place.
        shapes: Set if the graphs are only called with fixed shapes.
        producer: Versions of what made the bundle.
        files: Every other file of the bundle that generation needs.
    """

    schema_version: Literal[5] = 5
    target: TargetInfo
    drafter: DrafterInfo | None
    head: HeadInfo | None
    graphs: GraphFiles
    text: TextInfo
    precision: dict[str, PrecisionInfo]
    cache_form: CacheForm
    shapes: StaticShapes | None = None
    producer: dict[str, str]
    files: dict[FileName, FileInfo]

    @property
    def caches(self) -> tuple[CacheInfo, ...]:
        """Shapes of the cache's groups: the target's, and the drafter's if there is one."""
        return (self.target.cache,) if self.drafter is None else (self.target.cache, self.drafter.cache)

    @property
    def context_length(self) -> int:
        """Longest text in tokens: what the model allows, and what the longest of fixed caches holds."""
        longest = self.target.context_length
        return longest if self.shapes is None else min(longest, self.shapes.capacities[-1])

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter rates its tokens."""
        return self.head is not None and self.head.confidence != "none"


class Bundle:
    """A bundle on disk whose manifest has been read and whose files have been checked.

    Attributes:
        path: The folder.
        manifest: Its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path | str, *, check_hashes: bool | None = None) -> "Bundle":
        """Reads the manifest and checks the files it names.

        Args:
            path: The bundle's folder.
            check_hashes: Whether contents are compared with the manifest's hashes. By default those of files up to
                1 GiB are; sizes are compared always.

        Raises:
            BundleError: The folder is no bundle, has another schema version, or files are missing, short or altered.
            ProviderError: A compiled graph is not this bundle's.
        """
        path = Path(path)
        bundle = cls(path, _read_manifest(path))
        bundle._check_sizes()
        bundle._check_engines()
        bundle.check_hashes(check_hashes)
        return bundle

    def file(self, name: str) -> Path:
        """The path of a file of the bundle."""
        return self.path / name

    def graph(self, name: str) -> Path:
        """The file of one of the bundle's graphs: ``target``, ``drafter`` or ``head``."""
        return self.file(getattr(self.manifest.graphs, name))

    def text(self, name: str) -> str:
        """The content of a text file of the bundle.

        Raises:
            BundleError: It is not in UTF-8.
        """
        try:
            return self.file(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"{self.file(name)}: is not text in UTF-8: {error}") from error

    def draft_vocabulary(self) -> NDArray[np.int64] | None:
        """Target ids ``[V']`` of a reduced draft vocabulary.

        Raises:
            BundleError: The file does not hold as many ids of the target's vocabulary as the manifest says.
        """
        drafter = self.manifest.drafter
        if drafter is None or drafter.draft_vocabulary is None:
            return None
        path = self.file(drafter.draft_vocabulary)
        try:
            with path.open("rb") as file:
                ids = np.lib.format.read_array(file, allow_pickle=False)
        except ValueError as error:
            raise BundleError(f"{path}: not an array file: {error}") from error
        if ids.dtype != np.int64 or ids.shape != (drafter.vocabulary_size,):
            raise BundleError(
                f"{path}: holds {ids.dtype} {list(ids.shape)}, expected int64 [{drafter.vocabulary_size}]"
            )
        if ids.min() < 0 or ids.max() >= self.manifest.target.vocabulary_size:
            raise BundleError(f"{path}: has ids outside the target's vocabulary")
        return np.asarray(ids)

    def check_hashes(self, wanted: bool | None = None) -> None:
        """Compares every file's content with the manifest.

        Args:
            wanted: Whether to; by default for files up to 1 GiB.

        Raises:
            BundleError: A file was altered.
        """
        for name, info in self._present.items():
            if not (info.bytes <= HASHED_ALWAYS if wanted is None else wanted):
                continue
            found = hash_file(self.file(name))
            if found != info.sha256:
                raise BundleError(f"{self.file(name)}: altered since export (SHA-256 {found}, expected {info.sha256})")

    @property
    def _present(self) -> Mapping[str, FileInfo]:
        """Files that have to be there: graphs and their weights may be gone once they are compiled."""
        files = self.manifest.files
        if not (self.path / ENGINES).is_dir():
            return files
        text, drafter = self.manifest.text, self.manifest.drafter
        read = {text.tokenizer, text.chat_template, drafter.draft_vocabulary if drafter else None}
        return {name: info for name, info in files.items() if name in read or self.file(name).exists()}

    def _check_engines(self) -> None:
        """Compiled graphs must be this bundle's: the files that would show it may be gone."""
        for name, file in self.manifest.graphs.model_dump(exclude_none=True).items():
            here = {"graph": self.manifest.files[file].sha256, "precision": str(self.manifest.precision[name])}
            for key in sorted(self.path.glob(f"{ENGINES}/*/{Path(file).stem}*.json")):
                EngineKey.read(key).check(key, here, "take it away, or export the bundle again")

    def _check_sizes(self) -> None:
        for name, info in self._present.items():
            file = self.file(name)
            if not file.is_file():
                raise BundleError(f"{file}: missing; the manifest lists it with {info.bytes} bytes")
            if file.stat().st_size != info.bytes:
                raise BundleError(f"{file}: has {file.stat().st_size} bytes, expected {info.bytes}")


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    manifest = read_versioned(file, Manifest, SCHEMA_VERSION)
    if manifest is None:
        raise BundleError(f"{path}: no bundle here ({MANIFEST} is missing); make one with dspark-export")
    _check_graphs(file, manifest)
    _check_named(file, manifest)
    return manifest


def _check_graphs(file: Path, manifest: Manifest) -> None:
    """Every model that is described must have its graph, and every graph its precision."""
    block_drafter = manifest.drafter is not None and manifest.drafter.kind != "eagle3"
    needed = {"target": True, "drafter": manifest.drafter is not None, "head": block_drafter}
    names = {name for name, present in needed.items() if present}
    given = {
        "graphs": {name for name, graph in manifest.graphs.model_dump().items() if graph is not None},
        "precision": set(manifest.precision),
    }
    for field, found in given.items():
        if found != names:
            raise BundleError(f"{file}: {field} has {_listed(found)}; its models need {_listed(names)}")
    if (manifest.head is not None) != block_drafter:
        raise BundleError(f"{file}: head must be described exactly when a DSpark or DFlash drafter is")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _check_named(file: Path, manifest: Manifest) -> None:
    """Every file that a field names must be listed with its size and hash."""
    named: Mapping[str, str | None] = {
        "graphs.target": manifest.graphs.target,
        "graphs.drafter": manifest.graphs.drafter,
        "graphs.head": manifest.graphs.head,
        "text.tokenizer": manifest.text.tokenizer,
        "text.chat_template": manifest.text.chat_template,
        "drafter.draft_vocabulary": manifest.drafter.draft_vocabulary if manifest.drafter else None,
    }
    for field, name in named.items():
        if name is not None and name not in manifest.files:
            raise BundleError(f"{file}: {field} names {name!r}, which is not listed in files")
