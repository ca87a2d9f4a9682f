"""Plain lines on a console."""

from collections.abc import Callable
from functools import partial

from rich.console import Console

__all__ = ["notices"]


def notices(console: Console) -> Callable[[str], None]:
    """A function that prints plain lines."""
    return partial(console.print, markup=False, highlight=False, emoji=False, soft_wrap=True)
