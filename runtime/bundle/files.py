"""Files that appear whole or not at all."""

import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["check_writable", "write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file aside and renames it, so that a part of it is never seen.

    Raises:
        OSError: It cannot be written; the former content stays.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        aside = Path(scratch) / path.name
        aside.write_bytes(content)
        aside.replace(path)


def check_writable(folder: Path, names: Iterable[str]) -> None:
    """Makes sure that ``write_whole`` can write files, by doing all of it but the renaming.

    Permissions alone do not tell: root has all of them, even on a disk that is mounted read-only.

    Args:
        folder: Where; it and those above it are made if they do not exist, and removed again.
        names: The files.

    Raises:
        OSError: One cannot be written.
    """
    places = (folder, *folder.parents)
    made = [each for each in places if not each.exists()]
    existing = places[len(made)]
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} is no folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if (folder / name).is_dir():
                raise IsADirectoryError(f"{folder / name} is a folder")
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
                (Path(scratch) / name).write_bytes(b"")
    finally:
        for each in made:
            with suppress(OSError):  # it was not made, or somebody else has put something there meanwhile
                each.rmdir()
