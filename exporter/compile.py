"""Compiles a bundle's graphs for a device ahead of time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import onnx_ir as ir

from dspark.exporter.errors import ExportError
from dspark.exporter.export import Export
from dspark.providers import Choice, LoadOptions, OnnxRuntimeProvider
from dspark.providers.tensorrt.engine import build_engine
from dspark.providers.tensorrt.profiles import Limits
from dspark.providers.tensorrt.provider import TensorRtProvider
from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.cache.key_value_cache import TOKEN_STEP
from dspark.runtime.engine.engine import PREFILL_CHUNK
from dspark.runtime.model.eagle3_drafter import EXTENSION
from dspark.runtime.model.fixed_shapes import Dimensions, graph_dimensions

__all__ = ["Compilation"]

BATCH_SIZE = 8


@dataclass(frozen=True)
class Compilation:
    """A checked wish to compile.

    Attributes:
        choice: The provider that compiles and will run the graphs, and its options.
        batch_size: The most requests that TensorRT's engines run at once.
        sequence_length: Longest text in tokens that these take, prompt and output together.
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
            batch_size: The most requests that TensorRT's engines run at once; by default 8.
            sequence_length: Longest text in tokens that these take; by default the model's own limit.

        Raises:
            ExportError: The text is longer than the model's limit, or the provider does not take the precision.
            ProviderError: The provider does not compile, is not installed, or needs a device that is not there.
        """
        provider, limit = choice.provider, export.target.context_length
        if sequence_length is not None and sequence_length > limit:
            raise ExportError(f"--max-sequence-length is {sequence_length}; the model's limit is {limit}")
        for precision in (export.precision, export.draft_precision):
            if precision.linear not in provider.precisions:
                taken = ", ".join(sorted(provider.precisions))
                raise ExportError(f"{provider.name} does not compile {precision.linear}; choose one of {taken}")
            if precision.tables not in provider.precisions or (
                isinstance(provider, TensorRtProvider) and precision.tables.startswith("int8")
            ):
                raise ExportError(
                    f"{provider.name} cannot look tokens up in {precision.tables} tables; add --table-precision fp16"
                )
        provider.require_compiler(choice.options)
        return cls(choice, batch_size or BATCH_SIZE, sequence_length or limit)

    def run(self, folder: Path, manifest: Manifest, on_phase: Callable[[str], None] = lambda phase: None) -> list[str]:
        """Writes an engine, or a compiled model a shape, for each graph of a bundle into it.

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

            start = perf_counter()
            done = self._compile(name, folder / file, manifest, tell)
            built.append(f"Compiled {name} for {done}, {perf_counter() - start:.0f} s")
        return built

    def _compile(self, name: str, graph: Path, manifest: Manifest, tell: Callable[[str], None]) -> str:
        provider, precision = self.choice.provider, str(manifest.precision[name])
        if isinstance(provider, OnnxRuntimeProvider):
            static = provider.needs_static_shapes(self.choice.options)
            plan: Sequence[Dimensions] = graph_dimensions(manifest, name) if static else [{}]
            return self._compile_shapes(provider, graph, precision, plan, tell)
        assert isinstance(provider, TensorRtProvider), "require_compiler lets no other pass"
        limits = self._limits(manifest)
        in_place = name == "target" and manifest.cache_form == "in-place"
        content = _with_capacity(graph, limits.capacity) if in_place else graph.read_bytes()
        key = build_engine(provider.backend, graph, content, limits, precision, tell)
        profiles = ", ".join(key.profiles)
        return f"{key.device} with {key.backend} {key.version}: {key.layers:,} layers, profiles {profiles}"

    def _compile_shapes(
        self,
        provider: OnnxRuntimeProvider,
        graph: Path,
        precision: str,
        plan: Sequence[Dimensions],
        tell: Callable[[str], None],
    ) -> str:
        """A call of the library cannot be broken off: Ctrl-C ends it after the shape under way."""
        for count, dimensions in enumerate(plan, 1):
            tell(f"shape {count} of {len(plan)}")
            how = LoadOptions(options=self.choice.options, dimensions=dimensions)
            key = provider.compile(graph, precision, how)
        return f"{key.backend} ({key.device}) with {key.version}: {len(plan)} {'shape' if len(plan) == 1 else 'shapes'}"

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
