"""What commands write besides their output: messages, errors and progress, all on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

__all__ = ["messages", "print_error", "progress"]

messages = Console(stderr=True, emoji=False)


def print_error(message: str) -> None:
    """Prints an error as one line."""
    messages.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(total: int, description: str, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A bar on the terminal; the function that it yields is called after each piece of work.

    Args:
        total: Pieces of work.
        description: What is being done.
        shown: Whether the output goes elsewhere, so that the bar disturbs nothing.
    """
    with Progress(console=messages, transient=True, disable=not shown or total < 2 or not messages.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)
