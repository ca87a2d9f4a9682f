"""``--version``, as both command lines have it."""

from typing import Annotated, TypeAlias

import typer

from dspark.configs import own_version

__all__ = ["Version"]


def show(context: typer.Context, asked: bool) -> None:
    """Prints the command's name and the version, and ends the process."""
    if asked:
        typer.echo(f"{context.info_name} {own_version()}")
        raise typer.Exit


Version: TypeAlias = Annotated[
    bool, typer.Option("--version", callback=show, is_eager=True, help="Print the version and exit.")
]
