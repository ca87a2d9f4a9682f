"""What the documentation tells to type works: quick blocks run, slow ones run when asked, the others are parsed."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.command_lines import parser
from dspark.runtime.loading.serving_profile import find_profile
from tests.docs.blocks import PAGES, ROOT, Block, blocks, commands
from tests.docs.conftest import RunBlock
from tests.docs.in_process import simple_commands

RUN, CHECKED = ("bash", "python"), ("yaml", "json", "text")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETION = {"--install-completion", "--show-completion"}
"""Typer's own options, which act as soon as they are parsed."""
Blocks = pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))], ids=str)
RunPages = pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.language in RUN and block.treatment != "parsed" for block in blocks(page))],
    ids=str,
)


@Blocks
def test_no_block_escapes(page: Path) -> None:
    for block in blocks(page):
        assert block.language in RUN + CHECKED, f"{block.place}: a block of {block.language or 'no language'}"
        assert block.language in RUN or block.treatment == "run", f"{block.place}: marked, but it would not be run"


@Blocks
def test_quick_blocks_run(page: Path, run_quickly: RunBlock) -> None:
    for block in blocks(page):
        if block.language in RUN and block.treatment == "run":
            run_quickly(block)


@pytest.mark.slow
@RunPages
def test_all_blocks_run_in_a_shell(
    page: Path, folder: Path, run_in_shell: RunBlock, request: pytest.FixtureRequest
) -> None:
    told = [block for block in blocks(page) if block.language in RUN and block.treatment != "parsed"]
    if any(GGUF in block.text for block in told):
        (folder / GGUF).symlink_to(request.getfixturevalue("smollm2_gguf"))
    for block in told:
        run_in_shell(block)


@Blocks
def test_every_block_parses(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        try:
            if block.language == "bash":
                _check_block(block.text)
            elif block.language == "python":
                ast.parse(block.text)
            elif block.language == "json":
                json.loads(block.text)
            elif block.language == "yaml":
                profile = tmp_path / "profile.yaml"
                profile.write_text(block.text)
                find_profile(profile)
        except Exception as error:
            raise AssertionError(f"{block.place}: {error}\n{block.text}") from error


@pytest.mark.parametrize(
    "line",
    [
        "dspark-run generat bundle",
        "dspark-run generate bundle --prompts x",
        "dspark-run generate",
        "dspark-run generate bundle --scheduler fastest",
        "dspark-export my-model",
        "dspark-export my-model --output bundle --precision int3",
        "python samples/drafter/trainn.py",
        "python samples/drafter/train.py --minuts 3",
        "make everything",
        "head -1 prompts.jsonl | dspark-run generate bundle --inputt -",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    with pytest.raises(Exception, match=r"generat|[Nn]o such option|[Mm]issing|fastest|int3|trainn|minuts|everything"):
        _check_block(line)


def test_commands_of_a_block() -> None:
    text = "a --b 'c d' \\\n    --e *.f   # told\ng > h | i; j && k\n"
    assert [words for words in commands(text) if words] == [
        ["a", "--b", "c d", "--e", "*.f"],
        ["g"],
        ["# redirected to", "h"],
        ["i"],
        ["j"],
        ["k"],
    ]


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ("dspark-run inspect bundle\n\ndspark-export m \\\n    --output 'a > b'\n", True),
        ("python examples/chat.py bundle", True),
        ('dspark-run generate bundle --prompt "Why? All of *it*."', True),
        ("dspark-run inspect bundle > report", False),
        ("dspark-run evaluate bundle --input *.jsonl", False),
        ("cd bundle\ndspark-run inspect .", False),
        ("dspark-run inspect $BUNDLE", False),
        ("dspark-run inspect bundle; false", False),
        ("python -c pass", False),
        ("for name in a b; do\ndspark-run inspect $name\ndone", False),
    ],
)
def test_what_needs_a_shell_is_run_by_one(text: str, simple: bool) -> None:
    assert (simple_commands(text) is not None) == simple


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "dspark-run inspect no-such-bundle"),
        ("bash", "dspark-run inspekt bundle"),
        ("bash", "dspark-export my-model --output bundle"),
        ("bash", "python examples/generate.py no-such-bundle Hello"),
        ("bash", "true > report\nfalse"),
        ("python", "raise SystemExit('no')"),
        ("python", "import dspark.runtime\ndspark.runtime.Bundel"),
    ],
)
def test_a_block_that_fails_is_noticed(language: str, text: str, run_quickly: RunBlock) -> None:
    with pytest.raises(AssertionError, match=r"^here:"):
        run_quickly(Block("here", language, text, "run"))


def _check_block(text: str) -> None:
    for words in commands(text):
        if words:
            _check_command(words)


def _check_command(words: list[str]) -> None:
    """A command of the project exists, and so do its options; a script and a target of make exist."""
    name, *arguments = words
    if name.startswith("dspark-"):
        _check_arguments(name, parser(name), [argument for argument in arguments if argument not in COMPLETION])
    elif name == "python":
        script, *rest = arguments
        source = (ROOT / script).read_text(encoding="utf-8")
        for option in rest:
            known = option.removeprefix("--").replace("-", "_")
            assert not option.startswith("--") or known in source or option in source, f"{script} has no {option}"
    elif name == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in arguments:
            assert f"\n{target}:" in makefile, f"there is no target {target}"


def _check_arguments(name: str, command: Any, arguments: list[str]) -> None:
    if not hasattr(command, "commands"):
        if arguments:
            command.make_context(name, list(arguments))
    elif arguments:
        sub, *rest = arguments
        assert sub in command.commands, f"{name} has no command {sub}"
        command.commands[sub].make_context(sub, rest, parent=typer.Context(command, info_name=name))
