"""Files that appear whole or not at all."""

import tempfile
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file aside and renames it, so that nobody ever sees a part of it.

    Raises:
        OSError: It cannot be written; what was there before stays.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        aside = Path(scratch) / path.name
        aside.write_bytes(content)
        aside.replace(path)
