"""The folder that a bundle appears in, whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dspark.exporter.errors import ExportError
from dspark.runtime.bundle.manifest import MANIFEST

__all__ = ["check_output", "written_aside"]


def check_output(output: Path, *, force: bool, scratch: Path | None = None) -> None:
    """Refuses a place where no bundle can appear.

    Args:
        output: The bundle's folder.
        force: Whether an existing bundle may be replaced.
        scratch: What may lie in the folder all the same.

    Raises:
        ExportError: It holds something that must stay, or cannot be written to.
    """
    if output.exists() and not output.is_dir():
        raise ExportError(f"{output}: exists and is no folder")
    if output.exists() and any(path != scratch for path in output.iterdir()):
        if not force:
            raise ExportError(f"{output}: exists already; choose another output or pass --force to replace it")
        if not (output / MANIFEST).is_file():
            raise ExportError(f"{output}: holds files but no bundle ({MANIFEST}); --force replaces only bundles")
    there = next(path for path in (output, *output.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ExportError(f"{output}: cannot be made, because {there} is no folder that can be written to")


@contextmanager
def written_aside(output: Path, *, force: bool) -> Iterator[Path]:
    """A folder whose content becomes the output's when the block succeeds and disappears when it does not.

    It lies within an output that is there, which may be a mount point or the working folder and so cannot be replaced
    itself, and else beside it.

    Args:
        output: The bundle's folder; missing parents are made, and removed again if the block fails.
        force: Whether an existing bundle may be replaced.

    Raises:
        ExportError: The output has become what ``check_output`` refuses.
        OSError: It cannot be written.
    """
    place = output if output.exists() else output.parent
    with _made(place), tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=place) as name:
        scratch = Path(name)
        folder = scratch / "bundle"
        folder.mkdir()
        yield folder
        check_output(output, force=force, scratch=scratch)  # another export may have been faster
        if output.exists():
            _fill(output, folder, scratch)
        else:
            folder.rename(output)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes a folder and its parents; those that were not there are removed when the block fails."""
    made: list[Path] = []
    try:
        for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            with suppress(FileExistsError):
                path.mkdir()
                made.append(path)
        yield
    except BaseException:
        for path in reversed(made):
            with suppress(OSError):  # somebody else may have put something there
                path.rmdir()
        raise


def _fill(output: Path, folder: Path, scratch: Path) -> None:
    """Exchanges the content of a folder that is there; while it is mixed, it has no manifest. A failure undoes it."""
    replaced = scratch / "replaced"
    replaced.mkdir()
    old = sorted((path for path in output.iterdir() if path != scratch), key=lambda path: path.name != MANIFEST)
    new = sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST)
    moves = [(path, replaced / path.name) for path in old] + [(path, output / path.name) for path in new]
    begun: list[tuple[Path, Path]] = []
    try:
        for source, goal in moves:
            begun.append((source, goal))
            source.rename(goal)
    except BaseException:
        for source, goal in reversed(begun):
            if not source.exists():
                goal.rename(source)
        raise
