"""Blocks of code in the documentation, and what is done with each."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["PAGES", "ROOT", "Block", "blocks", "commands", "tokens"]

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "samples/*/README.md")
    for path in ROOT.glob(pattern)
)
"""Every page whose blocks are checked, as paths from the project's folder."""

MARK = re.compile(r"<!-- (slow|parsed: .+) -->")
Treatment = Literal["run", "slow", "parsed"]


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        place: Page and line, for messages.
        language: What stands behind its fence; empty for an indented block.
        text: The code.
        treatment: ``run`` as it stands, ``slow`` the same in slow tests, or only ``parsed``.
    """

    place: str
    language: str
    text: str
    treatment: Treatment


def tokens(page: Path) -> list[Token]:
    """The page as markdown-it reads it, with tables."""
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text(encoding="utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in their order; a mark counts for the block right behind it."""
    treatment: Treatment = "run"
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            line = token.map[0] + 1 if token.map else 0
            yield Block(f"{page}:{line}", token.info.strip(), token.content, treatment)
        mark = MARK.fullmatch(token.content.strip()) if token.type == "html_block" else None
        treatment = "run" if mark is None else "slow" if mark[1] == "slow" else "parsed"


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block, as lists of words; redirections end a command."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("|&;<>"):
                yield words
                words = [] if set(word) <= set("|&;") else ["# redirected to"]
            else:
                words.append(word)
        yield words
