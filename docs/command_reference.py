"""A Markdown extension that writes the commands' reference from the command lines themselves.

``<!-- commands: dspark-run -->`` becomes what Typer's own generator makes of the application: a section per command with
its usage and its options. The application is named ``app`` in the module that ``[project.scripts]`` of pyproject.toml
gives for the command.
"""

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import typer.cli
from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

__all__ = ["makeExtension", "parser", "reference"]

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
MARK = re.compile(r"<!-- commands: (\S+) -->")
BEFORE_HTML = 25
"""Python-Markdown takes comments away as HTML at priority 20."""


def parser(name: str) -> Any:
    """The parser of a command that the project installs: a group for ``dspark-run``, one command for the other."""
    scripts = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["scripts"]
    return typer.main.get_command(import_module(scripts[name].partition(":")[0]).app)


def reference(name: str) -> str:
    """The reference of a command in Markdown, without a title of its own."""
    command = parser(name)
    text = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command, info_name=name), name=name)
    return text.partition("\n")[2]


class _Commands(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return MARK.sub(lambda mark: reference(mark[1]), "\n".join(lines)).split("\n")


class _CommandReference(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the interface's name
        md.preprocessors.register(_Commands(md), "commands", BEFORE_HTML)


def makeExtension(**options: Any) -> Extension:  # noqa: N802 - the interface's name
    """Python-Markdown calls this."""
    return _CommandReference(**options)
