"""Tables and lines for people."""

from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspark.runtime.bundle import CacheInfo, Manifest, SourceFile
from dspark.runtime.calibration import Calibration

__all__ = ["key_value_table", "notices", "show_bundle"]


def notices(console: Console) -> Callable[[str], None]:
    """A function that prints plain lines."""
    return partial(console.print, markup=False, highlight=False, soft_wrap=True)


def key_value_table(title: str, rows: dict[str, object]) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
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
    files = Table("File", "Megabytes", "SHA-256", title="Files", title_justify="left")
    for name, info in manifest.files.items():
        files.add_row(escape(name), f"{info.bytes / 1e6:,.1f}", info.sha256[:16] + "…")
    console.print(files)
    precision = ", ".join(f"{graph} {kind}" for graph, kind in manifest.precision.items())
    made_by = ", ".join(f"{name} {version}" for name, version in manifest.producer.items())
    console.print(f"Precision: {precision}. Made by {made_by}.", highlight=False, markup=False)


def _cache(cache: CacheInfo) -> str:
    kilobytes = cache.layers * 2 * cache.kv_heads * cache.head_dim * 4 / 1e3
    return f"{cache.layers} layers × {cache.kv_heads} heads × {cache.head_dim}, {kilobytes:.1f} kB a token"


def _calibration(calibration: Calibration) -> str:
    before, after = calibration.mean_survival_ece
    return f"fitted to {calibration.rounds:,} drafts, survival ECE {before:.1%} before, {after:.1%} after"


def _sources(files: tuple[SourceFile, ...]) -> str:
    return ", ".join(file.name for file in files)
