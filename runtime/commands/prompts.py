"""Where commands take their prompts from."""

import sys
from collections.abc import Iterator
from pathlib import Path

from dspark.runtime.errors import RequestError

__all__ = ["read_lines"]


def read_lines(source: str) -> Iterator[bytes]:
    """Lines of a file, or of standard input.

    Args:
        source: The file; ``-`` stands for standard input.

    Raises:
        RequestError: It cannot be read.
    """
    try:
        if source == "-":
            if sys.stdin is None:
                raise RequestError("--input -: there is no standard input")
            yield from sys.stdin.buffer
            return
        with Path(source).open("rb") as file:
            yield from file
    except OSError as error:
        raise RequestError(f"{source}: cannot be read: {error}") from error
