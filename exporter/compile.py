"""Compiles a bundle's graphs for a device ahead of time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import onnx_ir as ir

from dspark.exporter.errors import ExportError
from dspark.exporter.export import Export
from dspark.providers import Choice, CompileOptions, SessionLimits
from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.cache.key_value_cache import TOKEN_STEP
from dspark.runtime.engine.prefill import PREFILL_CHUNK
from dspark.runtime.model.eagle3_drafter import EXTENSION
from dspark.runtime.model.fixed_shapes import graph_dimensions

__all__ = ["Compilation"]

BATCH_SIZE = 8


@dataclass(frozen=True)
class Compilation:
    """A checked wish to compile.

    Attributes:
        choice: The provider that compiles and will run the graphs, and its options.
        batch_size: The most requests that run at once, where the provider compiles for ranges of shapes.
        sequence_length: Longest text in tokens there, prompt and output together.
    """

    choice: Choice
    batch_size: int
    sequence_length: int

    @classmethod
    def of(
        cls, choice: Choice, export: Export, batch_size: int | None = None, sequence_length: int | None = None
    ) -> "Compilation":
        """Refuses what cannot work before anything is written.

        Args:
            choice: The provider that compiles and will run the graphs, and its options.
            export: What is about to be exported.
            batch_size: The most requests that run at once, where the provider compiles for ranges; by default 8.
            sequence_length: Longest text in tokens there; by default the model's own limit.

        Raises:
            ExportError: The text is longer than the model's limit, or the provider does not take the precision.
            ProviderError: The provider does not compile, is not installed, or needs a device that is not there.
        """
        provider, limit = choice.provider, export.target.context_length
        if sequence_length is not None and sequence_length > limit:
            raise ExportError(f"--max-sequence-length is {sequence_length}; the model's limit is {limit}")
        tables = provider.precisions if provider.compiled_tables is None else provider.compiled_tables
        for precision in (export.precision, export.draft_precision):
            if precision.linear not in provider.precisions:
                taken = ", ".join(sorted(provider.precisions))
                raise ExportError(f"{provider.name} does not compile {precision.linear}; choose one of {taken}")
            if precision.tables not in tables:
                raise ExportError(
                    f"{provider.name} cannot look tokens up in {precision.tables} tables; add --table-precision fp16"
                )
        provider.require_compiler(choice.options)
        return cls(choice, batch_size or BATCH_SIZE, sequence_length or limit)

    def run(self, folder: Path, manifest: Manifest, on_phase: Callable[[str], None] = lambda phase: None) -> list[str]:
        """Compiles each graph of a bundle into it.

        Args:
            folder: The bundle's folder.
            manifest: Its manifest.
            on_phase: Called with every phase that begins, in words; from other threads.

        Returns:
            For each graph, what was built, in words.

        Raises:
            ProviderError: A graph cannot be built.
        """
        built = []
        for name, file in manifest.graphs.model_dump(exclude_none=True).items():

            def tell(phase: str, graph: str = name) -> None:
                on_phase(f"Compiling {graph}: {phase}")

            start, graph = perf_counter(), folder / file
            done = self.choice.provider.compile(graph, self._options(name, graph, manifest, tell))
            built.append(f"Compiled {name} for {done}, {perf_counter() - start:.0f} s")
        return built

    def _options(self, name: str, graph: Path, manifest: Manifest, tell: Callable[[str], None]) -> CompileOptions:
        provider, options = self.choice.provider, self.choice.options
        limits = self._limits(name, manifest)
        return CompileOptions(
            precision=str(manifest.precision[name]),
            options=options,
            shapes=graph_dimensions(manifest, name) if provider.needs_static_shapes(options) else (),
            limits=limits,
            draft_tokens=_draft_tokens(manifest),
            content=_with_cache_of(graph, limits) if limits.fixed_cache else None,
            on_phase=tell,
        )

    def _limits(self, name: str, manifest: Manifest) -> SessionLimits:
        """The largest calls of a graph that the runtime may come to."""
        drafted, in_place = _draft_tokens(manifest), manifest.cache_form == "in-place"
        # A round writes whole drafts in place; a cache that new rows are appended to may have grown by an eighth.
        capacity = self.sequence_length + (drafted if in_place else self.sequence_length // 8)
        target = name == "target"
        return SessionLimits(
            requests=self.batch_size,
            prompt_tokens=PREFILL_CHUNK if target else EXTENSION,
            tokens_per_request=1 + drafted if target else EXTENSION,
            cache_tokens=-(-capacity // TOKEN_STEP) * TOKEN_STEP,
            fixed_cache=target and in_place and self.choice.provider.compiles_fixed_cache,
        )


def _draft_tokens(manifest: Manifest) -> int:
    return manifest.drafter.draft_length if manifest.drafter else 0


def _with_cache_of(graph: Path, limits: SessionLimits) -> bytes:
    """A graph in which S is fixed."""
    model = ir.load(graph)
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape(limits.cache_tokens if size == "S" else size for size in value.shape)
    content: bytes = ir.to_proto(model).SerializeToString()
    return content
