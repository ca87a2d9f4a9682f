"""``manifest.json``: what a bundle holds. Written by the exporter and read here; the one definition of the format."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from dspark.runtime.bundle.versioned_file import read_versioned
from dspark.runtime.errors import BundleError

__all__ = [
    "MANIFEST",
    "SCHEMA_VERSION",
    "BlocksInfo",
    "CacheForm",
    "CacheInfo",
    "DrafterInfo",
    "FileInfo",
    "GraphFiles",
    "HeadInfo",
    "Manifest",
    "PrecisionInfo",
    "PrecisionName",
    "SourceFile",
    "StaticShapes",
    "TargetInfo",
    "TextInfo",
    "read_manifest",
]

MANIFEST = "manifest.json"
SCHEMA_VERSION = 5
LONGEST_NAME = 255


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
    """Cache rows of a model: ``[B, kv_heads, tokens, head_dim]``, keys and values, per layer."""

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


def read_manifest(path: Path) -> Manifest:
    """Reads and checks the manifest of a bundle's folder.

    Raises:
        BundleError: There is none, or it is damaged, of another version, or contradicts itself.
    """
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
