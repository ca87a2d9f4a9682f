"""The reference of the commands, as it is made when the site is built."""

import re

import pytest

from docs.command_lines import parser, reference


@pytest.mark.parametrize("name", ["dspark-run", "dspark-export"])
def test_every_option_stands_in_its_panel(name: str) -> None:
    command = parser(name)
    commands = {f"{name} {each}": found for each, found in getattr(command, "commands", {}).items()} or {name: command}
    sections = re.split(r"^## `(.+)`$", reference(name), flags=re.MULTILINE)
    written = dict(zip(sections[1::2], sections[2::2], strict=True)) or {name: sections[0]}
    assert list(written) == list(commands)
    for title, each in commands.items():
        found = {}
        for line in written[title].splitlines():
            if head := re.fullmatch(r"\*\*(.+)\*\*:", line):
                panel = head[1]
            elif option := re.match(r"\* `(--[\w-]+)", line):
                found[option[1]] = panel
        told = [parameter for parameter in each.params if parameter.opts[0].startswith("--")]
        assert found == {option.opts[0]: option.rich_help_panel or "Options" for option in told} | {"--help": "Options"}
