"""Compiles a bundle's graphs for a device ahead of time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import perf_counter

import onnx_ir as ir

from dspark.exporter.errors import ExportError
from dspark.exporter.export import Export
from dspark.providers.tensorrt import TENSORRT_PROVIDER, TENSORRT_RTX_PROVIDER, TensorRtProvider
from dspark.providers.tensorrt_engine import build_engine
from dspark.providers.tensorrt_profiles import Limits
from dspark.runtime.bundle import Manifest
from dspark.runtime.cache import TOKEN_STEP
from dspark.runtime.drafting import EXTENSION
from dspark.runtime.engine import PREFILL_CHUNK

__all__ = ["Compilation", "Compiler"]


class Compiler(StrEnum):
    """What compiles."""

    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


PROVIDERS: Mapping[Compiler, TensorRtProvider] = {
    Compiler.TENSORRT: TENSORRT_PROVIDER,
    Compiler.TENSORRT_RTX: TENSORRT_RTX_PROVIDER,
}


@dataclass(frozen=True)
class Compilation:
    """A checked wish to compile.

    Attributes:
        provider: Runs what is compiled.
        batch_size: The most requests that can run at once.
        sequence_length: Longest text in tokens, prompt and output together.
    """

    provider: TensorRtProvider
    batch_size: int
    sequence_length: int

    @classmethod
    def of(cls, compiler: Compiler, export: Export, batch_size: int, sequence_length: int | None) -> "Compilation":
        """Refuses what cannot work before anything is written.

        Args:
            compiler: What compiles.
            export: What is about to be exported.
            batch_size: The most requests that can run at once.
            sequence_length: Longest text in tokens; by default the model's own limit.

        Raises:
            ExportError: The text is longer than the model's limit, or the compiler does not take the precision.
            ProviderError: The compiler is not installed or needs a GPU that is not there.
        """
        provider, limit = PROVIDERS[compiler], export.target.context_length
        if sequence_length is not None and sequence_length > limit:
            raise ExportError(f"--max-sequence-length is {sequence_length}; the model's limit is {limit}")
        for precision in (export.precision, export.draft_precision):
            if precision.linear not in provider.precisions:
                taken = ", ".join(sorted(provider.precisions))
                raise ExportError(f"{provider.name} does not compile {precision.linear}; choose one of {taken}")
            if precision.tables.startswith("int8"):
                raise ExportError(
                    f"{provider.name} cannot look tokens up in {precision.tables} tables; add --table-precision fp16"
                )
        provider.backend.load()
        provider.backend.device()
        return cls(provider, batch_size, sequence_length or limit)

    def run(self, folder: Path, manifest: Manifest, on_phase: Callable[[str], None] = lambda phase: None) -> list[str]:
        """Writes an engine for each graph of a bundle into it.

        Args:
            folder: The bundle's folder.
            manifest: Its manifest.
            on_phase: Called with every phase that begins, in words; from other threads.

        Returns:
            For each graph, what was built, in words.

        Raises:
            ProviderError: A graph cannot be built.
        """
        limits = self._limits(manifest)
        built = []
        for name, file in manifest.graphs.model_dump(exclude_none=True).items():

            def tell(phase: str, graph: str = name) -> None:
                on_phase(f"Compiling {graph}: {phase}")

            start = perf_counter()
            in_place = name == "target" and manifest.cache_form == "in-place"
            graph = folder / file
            content = _with_capacity(graph, limits.capacity) if in_place else graph.read_bytes()
            key = build_engine(self.provider.backend, graph, content, limits, str(manifest.precision[name]), tell)
            built.append(
                f"Compiled {name} for {key.device} with {key.backend} {key.version}: {key.layers:,} layers, "
                f"profiles {', '.join(key.profiles)}, {perf_counter() - start:.0f} s"
            )
        return built

    def _limits(self, manifest: Manifest) -> Limits:
        draft_tokens = manifest.drafter.draft_length if manifest.drafter else 0
        if manifest.cache_form == "in-place":
            capacity = self.sequence_length + draft_tokens  # a round writes whole drafts
        else:
            capacity = self.sequence_length + self.sequence_length // 8  # the cache may have grown so far
        return Limits(
            batch=self.batch_size,
            draft_tokens=draft_tokens,
            chunk=PREFILL_CHUNK,
            extension=EXTENSION,
            capacity=-(-capacity // TOKEN_STEP) * TOKEN_STEP,
        )


def _with_capacity(graph: Path, capacity: int) -> bytes:
    """A graph with S fixed: TensorRT writes in place only into caches whose size it knows."""
    model = ir.load(graph)
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape(capacity if size == "S" else size for size in value.shape)
    content: bytes = ir.to_proto(model).SerializeToString()
    return content
