"""Tables and lines for people."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspark.providers import PlacedNode
from dspark.runtime.bundle.calibration import Calibration
from dspark.runtime.bundle.manifest import CacheInfo, Manifest, SourceFile

__all__ = ["key_value_table", "show_bundle", "show_engines", "show_placement", "show_providers"]


def key_value_table(title: str, rows: dict[str, object]) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(str(value)))
    return table


def show_bundle(manifest: Manifest, calibration: Calibration | None, console: Console) -> None:
    """Prints what a bundle holds."""
    target, drafter, head = manifest.target, manifest.drafter, manifest.head
    console.print(
        key_value_table(
            "Target",
            {
                "model": f"{target.name} ({target.family})",
                "vocabulary": f"{target.vocabulary_size:,}",
                "context length": f"{target.context_length:,} tokens",
                "stop tokens": ", ".join(map(str, target.stop_token_ids)) or "none",
                "cache": _cache(target.cache),
                "chat template": "yes" if manifest.text.chat_template else "no",
                "tokenizer": "yes" if manifest.text.tokenizer else "no",
                "made from": _sources(target.source),
            },
        )
    )
    if drafter is None:
        console.print("No drafter: the bundle decodes plainly.")
    else:
        console.print(
            key_value_table(
                "Drafter",
                {
                    "model": f"{drafter.name} ({drafter.kind}, {drafter.layout} layout)",
                    "draft tokens": drafter.draft_length,
                    "taps": ", ".join(map(str, drafter.taps)),
                    "vocabulary": f"{drafter.vocabulary_size:,}",
                    "head": "none" if head is None else f"{head.kind}, rank {head.markov_rank}",
                    "confidence": "none" if head is None else head.confidence.replace("_", " "),
                    "calibration": "none" if calibration is None else _calibration(calibration),
                    "cache": _cache(drafter.cache),
                    "made from": _sources(drafter.source),
                },
            )
        )
    files = _table("Files", "File", "Megabytes", "SHA-256, first 16")
    for name, info in manifest.files.items():
        files.add_row(escape(name), f"{info.bytes / 1e6:,.1f}", info.sha256[:16])
    console.print(files)
    precision = ", ".join(f"{graph} {kind}" for graph, kind in manifest.precision.items())
    made_by = ", ".join(f"{name} {version}" for name, version in manifest.producer.items())
    console.print(f"Precision: {precision}. Made by {made_by}.", highlight=False, markup=False)


def show_engines(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Prints a table of what was compiled ahead of time, if there is any."""
    if not rows:
        return
    table = _table("Compiled", "Graph", "Provider", "Device", "Version", "Shapes")
    for row in rows:
        shapes = "\n".join(f"{name}: {_ranges(ranges)}" for name, ranges in row["profiles"].items())
        table.add_row(row["of"], *(escape(row[key]) for key in ("backend", "device", "version")), escape(shapes))
    console.print(table)


def show_providers(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Prints a table of providers, the ones that can be used first."""
    table = _table("Usable", "Provider", "Devices", "Load", "Precisions", "Shapes")
    missing = _table("Not usable here", "Provider", "Precisions", "Why not")
    for row in rows:
        name, precisions = escape(row["name"]), ", ".join(row["precisions"])
        if row["problem"] is None:
            loads = "\n".join(map(_load, row["load"]))
            table.add_row(name, escape("\n".join(row["devices"])), loads, precisions, row["shapes"])
        else:
            missing.add_row(name, precisions, escape(row["problem"]))
    for each in (table, missing):
        if each.row_count:
            console.print(each)


def show_placement(nodes: Mapping[str, Sequence[PlacedNode]], console: Console) -> None:
    """Prints how many nodes of each graph run where, and which kinds."""
    table = _table("Placement", "Graph", "Runs on", "Nodes", "Operators")
    for graph, placed in nodes.items():
        for provider in dict.fromkeys(node.provider for node in placed):
            operators = Counter(node.operator for node in placed if node.provider == provider)
            kinds = ", ".join(f"{name} {count}" for name, count in operators.most_common())
            table.add_row(graph, provider, f"{operators.total():,}", kinds)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    """A table whose cells go on in the next line where they are too long."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _load(load: Mapping[str, Any]) -> str:
    busy = "" if load["utilisation"] is None else f"{load['utilisation']:.0%} busy"
    free = "" if load["free_bytes"] is None else f"{load['free_bytes'] / 1e9:.1f} GB free"
    return ", ".join(filter(None, (busy, free)))


def _ranges(ranges: Mapping[str, Sequence[int]]) -> str:
    """Least and largest values of a shape's symbols."""
    values = (
        f"{symbol} {low}" if low == high else f"{symbol} {low}–{high}" for symbol, (low, _, high) in ranges.items()
    )
    return ", ".join(values) or "any"


def _cache(cache: CacheInfo) -> str:
    kilobytes = cache.layers * 2 * cache.kv_heads * cache.head_dim * 4 / 1e3
    return f"{cache.layers} layers × {cache.kv_heads} heads × {cache.head_dim}, {kilobytes:.1f} kB per token"


def _calibration(calibration: Calibration) -> str:
    before, after = calibration.mean_survival_ece
    return f"fitted to {calibration.rounds:,} drafts, survival ECE {before:.1%} before, {after:.1%} after"


def _sources(files: tuple[SourceFile, ...]) -> str:
    return ", ".join(file.name for file in files)
