"""``dspark-export``: checkpoints in, bundle out."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dspark.exporter.errors import DSparkError, ExportError
from dspark.providers.errors import ProviderError
from dspark.providers.names import provider_names
from dspark.runtime.bundle.manifest import CacheForm, PrecisionName
from dspark.runtime.reports.lines import notices
from dspark.runtime.reports.version import Version

if TYPE_CHECKING:
    from dspark.exporter.compile import Compilation
    from dspark.exporter.export import Export
    from dspark.runtime.bundle.manifest import Manifest

__all__ = ["main"]

DRAFTER = "Drafter"
PRECISION = "Precision"
SHAPES = "Shapes"
COMPILE = "Compile"
OUTPUT = "Output"
PRECISIONS = ", ".join(get_args(PrecisionName))

app = typer.Typer(pretty_exceptions_enable=False)
messages = Console(stderr=True, emoji=False)


def complete_provider(incomplete: str) -> list[str]:
    """Provider names, for the shell."""
    return [name for name in provider_names() if name.startswith(incomplete)]


@app.command()
def export(
    target: Annotated[Path, typer.Argument(help="A Hugging Face folder or a GGUF file.")],
    output: Annotated[Path, typer.Option(help="The bundle's folder.", rich_help_panel=OUTPUT)],
    drafter: Annotated[
        Path | None,
        typer.Option(
            help="A DSpark, DFlash or EAGLE-3 drafter's folder; without one, decoding is plain.",
            rich_help_panel=DRAFTER,
        ),
    ] = None,
    precision: Annotated[
        PrecisionName,
        typer.Option(help=f"Of the target's linear layers: {PRECISIONS}.", metavar="NAME", rich_help_panel=PRECISION),
    ] = "fp32",
    draft_precision: Annotated[
        PrecisionName | None,
        typer.Option(help="Of the drafter's.", metavar="NAME", show_default="the target's", rich_help_panel=PRECISION),
    ] = None,
    table_precision: Annotated[
        PrecisionName | None,
        typer.Option(
            help="Of embedding and LM head.",
            metavar="NAME",
            show_default="that of the linear layers; int8 with int4",
            rich_help_panel=PRECISION,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale.",
            show_default="64 with int8-blocks, 32 with int4",
            rich_help_panel=PRECISION,
        ),
    ] = None,
    accuracy_level: Annotated[
        int | None,
        typer.Option(
            help="Least precision of activations in blocks: 1 fp32, 2 fp16, 3 bf16, 4 int8, 0 the device's.",
            show_default="4",
            rich_help_panel=PRECISION,
        ),
    ] = None,
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the drafter may draft, the most frequent.", show_default="all", rich_help_panel=DRAFTER
        ),
    ] = None,
    draft_vocabulary_from: Annotated[
        Path | None,
        typer.Option(help="Token ids to count (.npz).", show_default="the lowest ids", rich_help_panel=DRAFTER),
    ] = None,
    draft_top_k: Annotated[
        int | None,
        typer.Option(
            help="Likeliest tokens of a slot that the head chooses from.", show_default="all", rich_help_panel=DRAFTER
        ),
    ] = None,
    cache_form: Annotated[
        CacheForm | None,
        typer.Option(
            help="in-place: the target writes new rows into its cache; delta: it returns them (NPUs cannot write).",
            metavar="NAME",
            show_default="in-place, where it can be",
            rich_help_panel=SHAPES,
        ),
    ] = None,
    compiler: Annotated[
        str | None,
        typer.Option(
            "--compile",
            metavar="PROVIDER",
            help="Compile the graphs for a provider's device, as NAME or NAME:key=value,key=value.",
            show_default="no",
            autocompletion=complete_provider,
            rich_help_panel=COMPILE,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Engines of TensorRT take so many requests at once.",
            show_default="8",
            rich_help_panel=COMPILE,
        ),
    ] = None,
    max_sequence_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Engines of TensorRT take texts of so many tokens.",
            show_default="the model's limit",
            rich_help_panel=COMPILE,
        ),
    ] = None,
    static: Annotated[
        bool,
        typer.Option("--static", help="Fix all shapes, for devices that compile each shape.", rich_help_panel=SHAPES),
    ] = False,
    static_batch: Annotated[
        int | None,
        typer.Option(help="Requests that run at once, with --static.", show_default="1", rich_help_panel=SHAPES),
    ] = None,
    static_chunk: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens that a step computes, with --static.", show_default="128", rich_help_panel=SHAPES
        ),
    ] = None,
    static_cache: Annotated[
        list[int] | None,
        typer.Option(
            help="A length of the cache, with --static; may be given several times.",
            show_default="256, 1024, 4096, 16384 up to the longest text",
            rich_help_panel=SHAPES,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare with PyTorch (needs dspark-onnx\\[verify]).", rich_help_panel=OUTPUT),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.", rich_help_panel=OUTPUT)] = False,
    version: Version = False,
) -> None:
    """Turns a target model and a drafter into a bundle for dspark-run."""
    from dspark.exporter.compile import Compilation
    from dspark.exporter.export import Static, prepare
    from dspark.exporter.precision import BITS, Precision, PrecisionProfile
    from dspark.exporter.verify import require_verify_dependencies, show_comparisons, verify_bundle
    from dspark.providers import PROVIDERS, Choice

    if verify:
        require_verify_dependencies(target)
    with _about_compiling(compiler):
        choice = None if compiler is None else Choice.parse(compiler)
    fixed = static or (choice is not None and choice.provider.needs_static_shapes(choice.options))
    if not fixed:
        _refuse("--static", static_batch=static_batch, static_chunk=static_chunk, static_cache=static_cache or None)
    if choice is None or not choice.provider.compiles_ranges:
        compilers = " or ".join(f"--compile {each.name}" for each in PROVIDERS if each.compiles_ranges)
        _refuse(compilers, batch_size=batch_size, max_sequence_length=max_sequence_length)
    if drafter is None:
        _refuse("--drafter", draft_precision=draft_precision)
    profile, draft_profile = (
        PrecisionProfile.of(
            Precision(linear),
            None if table_precision is None else Precision(table_precision),
            block_size,
            accuracy_level,
        )
        for linear in (precision, draft_precision or precision)
    )
    if profile.blocks is None and draft_profile.blocks is None:
        _refuse(f"a precision in blocks ({', '.join(BITS)})", block_size=block_size, accuracy_level=accuracy_level)
    delta = fixed or (choice is not None and "in-place" not in choice.provider.cache_forms)
    if delta and cache_form == "in-place":
        raise ExportError("--cache-form in-place is for devices that write into the cache; this export needs delta")
    batch = 1 if static_batch is None else static_batch
    planned = prepare(
        target,
        drafter,
        output,
        force=force,
        precision=profile,
        draft_precision=draft_profile,
        draft_vocabulary=draft_vocabulary,
        draft_vocabulary_from=draft_vocabulary_from,
        draft_top_k=draft_top_k,
        cache_form="delta" if delta else cache_form or "in-place",
        static=Static(batch, static_chunk, tuple(static_cache or ())) if fixed else None,
    )
    with _about_compiling(compiler):
        compilation = None if choice is None else Compilation.of(choice, planned, batch_size, max_sequence_length)
    for note in planned.notes:
        notices(messages)(f"note: {note}")
    manifest = _export(planned, compilation, compiler)
    _show(manifest, output)
    if verify:
        with messages.status("Comparing with PyTorch"):
            comparisons = verify_bundle(planned, output, target)
        show_comparisons(comparisons, Console())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; an error of ours becomes one line and exit code 1.

    Args:
        arguments: What stands behind the command's name; by default what this process was started with.
    """
    for name in {"SIGTERM", "SIGHUP"} & set(dir(signal)):  # half-written files are removed, as after Ctrl-C
        signal.signal(getattr(signal, name), lambda received, frame: sys.exit(128 + received))
    try:
        app(arguments, prog_name="dspark-export")
    except DSparkError as error:
        messages.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _refuse(partner: str, **options: object) -> None:
    """Refuses options that would have no effect without another."""
    for name, value in options.items():
        if value is not None:
            raise ExportError(f"--{name.replace('_', '-')} has no effect without {partner}")


@contextmanager
def _about_compiling(text: str | None) -> Iterator[None]:
    """Names ``--compile`` in the errors of providers, which know nothing of it.

    Args:
        text: What the user wrote after it.
    """
    try:
        yield
    except ProviderError as error:
        raise ExportError(f"--compile {text}: {error}") from error


def _export(planned: "Export", compilation: "Compilation | None", compiler: str | None) -> "Manifest":
    from dspark.exporter.export import export_bundle

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    built: list[str] = []
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as progress:
        task = progress.add_task("Exporting", total=planned.weight_bytes)

        def compile_into(folder: Path, manifest: "Manifest") -> None:
            if compilation is not None:
                with _about_compiling(compiler):
                    told = compilation.run(folder, manifest, lambda phase: progress.update(task, description=phase))
                built.extend(told)

        manifest = export_bundle(planned, lambda count: progress.advance(task, count), compile_into)
    for line in built:
        notices(messages)(line)
    return manifest


def _show(manifest: "Manifest", output: Path) -> None:
    table = Table("File", "Megabytes")
    for name, info in manifest.files.items():
        table.add_row(name, f"{info.bytes / 1e6:,.1f}")
    table.add_section()
    table.add_row("total", f"{sum(info.bytes for info in manifest.files.values()) / 1e6:,.1f}")
    console = Console()
    notices(console)(f"Wrote {output}")
    console.print(table)
