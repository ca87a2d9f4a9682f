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
    """The reference of a command in Markdown, without a title of its own; a group's is that of its commands.

    It is what Typer's generator writes, with the options in the panels that ``--help`` shows.
    """
    command = parser(name)
    context = typer.Context(command, info_name=name)
    if not hasattr(command, "commands"):
        text = typer.cli.get_docs_for_click(obj=command, ctx=context, name=name)
        return _in_panels(text.partition("\n")[2], command)
    return "\n".join(
        _in_panels(typer.cli.get_docs_for_click(obj=each, ctx=context, indent=1, call_prefix=name), each)
        for each in command.commands.values()
    )


def _in_panels(text: str, command: Any) -> str:
    """Groups the list of a command's options; those of no panel stay the first ones."""
    before, head, options = text.partition("**Options**:\n\n")
    panel_of = {name: parameter.rich_help_panel for parameter in command.params for name in parameter.opts}
    panels: dict[str | None, list[str]] = {None: []}
    for line in filter(None, options.splitlines()):
        panels.setdefault(panel_of.get(line[3:].split("`")[0].split()[0]), []).append(line)
    others = [f"**{panel}**:\n\n" + "\n".join(lines) for panel, lines in panels.items() if panel]
    return before + "\n\n".join([*others, head + "\n".join(panels[None])]) + "\n"
