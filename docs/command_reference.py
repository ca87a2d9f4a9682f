"""A Markdown extension that writes the commands' reference from the command lines themselves.

``<!-- commands: dspark-run -->`` becomes what Typer's own generator makes of the application: a section per command
with its usage and its options.
"""

import re
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

from docs.command_lines import reference

__all__ = ["makeExtension"]

MARK = re.compile(r"<!-- commands: (\S+) -->")
BEFORE_FENCES = 27
"""Blocks of code are set aside at priority 25, comments are taken away as HTML at 20."""


class _Commands(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return MARK.sub(lambda mark: reference(mark[1]), "\n".join(lines)).split("\n")


class _CommandReference(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the interface's name
        md.preprocessors.register(_Commands(md), "commands", BEFORE_FENCES)


def makeExtension(**options: Any) -> Extension:  # noqa: N802 - the interface's name
    """Python-Markdown calls this."""
    return _CommandReference(**options)
