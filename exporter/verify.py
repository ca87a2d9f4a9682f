"""The parity check: the graphs of a bundle against a PyTorch reference, on random texts.

Every graph gets the reference's values as inputs, so a fault shows in the graph that has it and nowhere else.
"""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dspark.exporter.checkpoints import is_gguf_file
from dspark.exporter.checkpoints.description import DrafterKind
from dspark.exporter.errors import ExportError, ParityError
from dspark.exporter.export import Export
from dspark.exporter.exported_graphs import Arrays, ExportedGraphs
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.contract import CANDIDATES

if TYPE_CHECKING:
    from dspark.exporter.torch_reference import BlockReference, Eagle3Reference

__all__ = ["Comparison", "require_verify_dependencies", "show_comparisons", "verify_bundle"]

TOLERANCE = 1e-3
"""Of the largest reference value. Float32 implementations differ by 1e-6 to 1e-4 after some tens of layers; faults
(another layer, position, mask or scale) make a difference of 1e-2 and more."""

LENGTHS = (1, 17)
"""Tokens of the texts that every bundle is checked with."""

LONGEST = 512
"""Tokens of the longest text: effects that begin beyond it, such as wide sliding windows, are not checked."""

SEED = 0

SMALLEST = float(np.finfo(np.float32).tiny)
"""Divides the error when all reference values are zero."""

Pair: TypeAlias = tuple[str, NDArray[Any], NDArray[Any]]
"""Graph and output, its value, and the reference's."""


@dataclass(frozen=True)
class Comparison:
    """How far one output of a graph is from the reference, over all texts.

    Attributes:
        what: Graph and output.
        absolute_error: The largest difference.
        relative_error: The largest difference as a part of the largest reference value of the same text.
        tolerance: The relative error that is allowed.
    """

    what: str
    absolute_error: float
    relative_error: float
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.relative_error <= self.tolerance


def require_verify_dependencies(source: Path) -> None:
    """Checks that the reference can be computed at all, before an export starts.

    Args:
        source: The target's checkpoint; transformers needs accelerate to load a GGUF file.

    Raises:
        ExportError: PyTorch or another package is not installed.
    """
    needed = ["torch", "transformers", "onnxruntime", *(["accelerate"] if is_gguf_file(source) else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f"--verify needs {', '.join(missing)}: pip install 'dspark-onnx[verify]'")


def verify_bundle(export: Export, bundle: Path, source: Path) -> list[Comparison]:
    """Compares what the graphs of a bundle compute with PyTorch.

    The target runs over each text in two pieces, the second through the cache of the first; its reference is
    transformers' model of the same checkpoint. After each text one block is drafted greedily; its reference is written
    from the drafter's definition. Tokens are compared by the reference's logits, so that a tie may go either way.

    Args:
        export: What the bundle was made from.
        bundle: The bundle's folder.
        source: The target's checkpoint, a Hugging Face folder or a GGUF file.

    Returns:
        A comparison for each output of each graph.

    Raises:
        ExportError: PyTorch or another package is missing, or transformers cannot load the checkpoint.
        BundleError: The bundle is damaged.
        ParityError: ONNX Runtime cannot run a graph.
    """
    require_verify_dependencies(source)
    graphs = ExportedGraphs(Bundle.open(bundle))
    errors: dict[str, NDArray[np.float64]] = {}
    for what, value, expected in _pairs(export, graphs, source):
        errors[what] = np.maximum(errors.get(what, 0.0), _errors(value, expected))  # keeps NaN
    return [Comparison(what, *map(float, largest)) for what, largest in errors.items()]


def show_comparisons(comparisons: Sequence[Comparison], console: Console) -> None:
    """Prints the errors as a table.

    Raises:
        ParityError: After the table, if an error is beyond its tolerance; names the worst.
    """
    table = Table("Output", "Largest error", "Relative", "", title="Graphs against PyTorch", title_justify="left")
    for item in comparisons:
        mark = "[green]ok[/green]" if item.ok else f"[red]above {item.tolerance:g}[/red]"
        table.add_row(item.what, f"{item.absolute_error:.1e}", f"{item.relative_error:.1e}", mark)
    console.print(table)
    failed = [item for item in comparisons if not item.ok]
    if failed:
        worst = max(failed, key=lambda item: math.inf if math.isnan(item.relative_error) else item.relative_error)
        raise ParityError(
            f"{worst.what} differs from the PyTorch reference by {worst.relative_error:.1e} of its largest value; "
            f"{worst.tolerance:g} is allowed"
        )


def _pairs(export: Export, graphs: ExportedGraphs, source: Path) -> Iterator[Pair]:
    """Every output of every graph beside its reference, text after text."""
    from dspark.exporter.torch_reference import BlockReference, Eagle3Reference, TargetReference

    target = TargetReference(source, export.target)
    drafter = None
    if export.drafter is not None:
        kind = Eagle3Reference if export.drafter.kind is DrafterKind.EAGLE3 else BlockReference
        drafter = kind(export.drafter, target.tables)
    random = np.random.default_rng(SEED)
    for length in _lengths(export):
        ids = random.integers(export.target.vocabulary_size, size=length + 1)
        logits, states = target.forward(ids[:-1])
        context = drafter.context(states) if drafter else {}
        yield from _outputs("target", graphs.target(ids[:-1]), {"logits": logits, **context})
        if isinstance(drafter, Eagle3Reference):
            yield from _steps(graphs, drafter, context, ids[1:])
        elif isinstance(drafter, BlockReference):
            yield from _block(graphs, drafter, context, int(ids[-1]))


def _lengths(export: Export) -> list[int]:
    """Lengths of the texts, ascending: transformers' dynamic RoPE scaling depends on the longest text so far."""
    backbones = [model.backbone for model in (export.target, export.drafter) if model is not None]
    reaches = [layer.window for backbone in backbones for layer in backbone.layers if layer.window is not None]
    reaches += [backbone.rope.dynamic.original_length for backbone in backbones if backbone.rope.dynamic is not None]
    longer = [reach + LENGTHS[-1] for reach in reaches]
    limit = export.target.context_length - 1  # an anchor follows
    return sorted({min(length, limit) for length in (*LENGTHS, *longer) if length <= LONGEST})


def _block(graphs: ExportedGraphs, drafter: "BlockReference", context: Arrays, anchor: int) -> Iterator[Pair]:
    block = drafter.block(context, anchor)
    proposed = {name: value for name, value in block.items() if name != CANDIDATES}  # ties may go either way
    yield from _outputs("drafter", graphs.block(context, anchor), proposed)
    drafted = graphs.head(block, anchor)
    tokens = drafted.pop("tokens")[0]
    expected = drafter.heads(block, anchor, tokens.tolist())
    yield from _outputs("head", drafted, expected)
    ids = drafter.vocabulary[block[CANDIDATES][0]] if CANDIDATES in block else drafter.vocabulary
    yield _choice("head", tokens, expected["draft_logits"][0], ids)


def _steps(
    graphs: ExportedGraphs, drafter: "Eagle3Reference", context: Arrays, following: NDArray[np.int64]
) -> Iterator[Pair]:
    drafted = graphs.eagle3(context, following)
    tokens = drafted.pop("tokens")[0]
    expected = drafter.steps(context, following.tolist(), tokens.tolist())
    yield from _outputs("drafter", drafted, expected)
    yield _choice("drafter", tokens, expected["draft_logits"][0], drafter.vocabulary)


def _outputs(graph: str, values: Arrays, expected: Arrays) -> Iterator[Pair]:
    for name, value in expected.items():
        yield f"{graph}: {name}", values[name], value


def _choice(graph: str, tokens: NDArray[np.int64], logits: NDArray[np.float32], ids: NDArray[np.int64]) -> Pair:
    """The reference's logits ``[γ]`` of the tokens that a graph chose, and the best there were.

    ``ids`` are the tokens that the logits belong to, ``[K]`` or, where slots differ, ``[γ, K]``.
    """
    same = ids == tokens[:, None]
    chosen = np.take_along_axis(logits, same.argmax(axis=1)[:, None], axis=1)[:, 0]
    return f"{graph}: tokens", np.where(same.any(axis=1), chosen, -np.inf), logits.max(axis=1)


def _errors(value: NDArray[Any], expected: NDArray[Any]) -> tuple[float, float]:
    """Absolute and relative error."""
    if value.shape != expected.shape:
        return math.inf, math.inf
    error = float(np.abs(value - expected).max())
    return error, error / max(float(np.abs(expected).max()), SMALLEST)
