"""The project's command lines, for the documentation and its tests.

An application is named ``app`` in the module that ``[project.scripts]`` of pyproject.toml gives for its command.
"""

import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import typer.cli

__all__ = ["parser", "reference"]

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@cache
def parser(name: str) -> Any:
    """The parser of a command that the project installs: a group for ``dspark-run``, one command for the other."""
    scripts = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["scripts"]
    return typer.main.get_command(import_module(scripts[name].partition(":")[0]).app)


def reference(name: str) -> str:
    """The reference of a command in Markdown, without a title of its own; a group's is that of its commands."""
    command = parser(name)
    text = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command, info_name=name), name=name)
    first = text.find("\n## ")
    return text[first:] if first >= 0 else text.partition("\n")[2]
