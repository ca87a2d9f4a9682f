"""Runs a block of code as it stands in the tests' own process, so that no interpreter starts and imports anew."""

import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block

__all__ = ["SCRIPTS", "run_here", "simple_commands"]

SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
"""Where the project's commands begin, as ``module:function`` by name."""
SHELL = set("|&;<>()$`*?[]#~=!{}\n")
"""What only a shell understands, outside of quotes."""


def simple_commands(text: str) -> list[list[str]] | None:
    """The commands of a shell block as lists of words.

    Returns:
        None if the block needs a shell: for an operator or an expansion, or for another program than the project's
        commands and Python scripts.
    """
    found = []
    for line in filter(str.strip, text.replace("\\\n", " ").splitlines()):
        words = shlex.split(line)
        plain = not any(SHELL & set(word) for word in shlex.split(line, posix=False) if word[0] not in "'\"")
        script = words[0] == "python" and words[1].endswith(".py")
        if not plain or not (script or words[0] in SCRIPTS):
            return None
        found.append(words)
    return found


def run_here(block: Block, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a block in this process and working directory.

    Returns:
        False if it needs a shell, and nothing was run.
    """
    if block.language == "python":
        _finish(block, lambda: exec(compile(block.text, block.place, "exec"), {"__name__": "__main__"}))
        return True
    found = simple_commands(block.text)
    for words in found or []:
        name, *arguments = words
        if name in SCRIPTS:
            module, _, function = SCRIPTS[name].partition(":")
            call = getattr(import_module(module), function)
        else:
            name, *arguments = arguments
            call = _script(Path(name))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        _finish(block, call)
    return found is not None


def _script(path: Path) -> Callable[[], object]:
    return lambda: runpy.run_path(str(path), run_name="__main__")


def _finish(block: Block, call: Callable[[], object]) -> None:
    """Calls what ends as a process does."""
    try:
        call()
    except (Exception, SystemExit) as ended:
        if not isinstance(ended, SystemExit) or ended.code:
            raise AssertionError(f"{block.place}: {sys.argv}: {ended!r}\n{block.text}") from ended
