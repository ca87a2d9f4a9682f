"""Help at 80 columns."""

import re

import pytest
import typer

from dspark.exporter import cli as exporter
from dspark.runtime.commands import app as runtime
from dspark.runtime.decoding.sampling_params import SamplingParams

COMMANDS = ["generate", "chat", "inspect", "providers", "bench", "profile", "evaluate", "calibrate", "compare"]
PANELS = {
    "generate": {"Prompts", "Sampling", "Speculation", "Serving", "Device", "Output"},
    "chat": {"Prompts", "Sampling", "Speculation", "Serving", "Device"},
    "inspect": {"Device", "Output"},
    "providers": {"Output"},
    "bench": {"Prompts", "Sampling", "Speculation", "Serving", "Measurement", "With --load", "Device", "Output"},
    "profile": {"Measurement", "Device", "Output"},
    "evaluate": {"Prompts", "Sampling", "Speculation", "Serving", "Device", "Output"},
    "calibrate": {"Prompts", "Sampling", "Serving", "Device", "Output"},
    "compare": {"Prompts", "Sampling", "Device", "Output"},
}


def shown(app: typer.Typer, *arguments: str) -> str:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def options_of(app: typer.Typer, command: str | None = None) -> list[str]:
    group = typer.main.get_command(app)
    found = group if command is None else group.commands[command]  # type: ignore[attr-defined]
    return [name for parameter in found.params for name in parameter.opts if name.startswith("--")]


def check(text: str, options: list[str]) -> None:
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert set(options) <= set(re.findall(r"--[a-z-]+", text))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_fits_and_has_panels(command: str) -> None:
    text = shown(runtime.app, command)
    check(text, options_of(runtime.app, command))
    panels = set(re.findall(r"^╭─ (.+?) ─", text, re.MULTILINE))
    assert panels - {"Arguments", "Options"} == PANELS[command]
    loose = re.search(r"╭─ Options ─+╮\n(.*?)╰", text, re.DOTALL)
    assert loose is not None
    assert set(re.findall(r"│ \*? *(--[a-z-]+)", loose[1])) == {"--help"}


def test_the_list_of_commands_fits() -> None:
    text = shown(runtime.app)
    check(text, ["--install-completion", "--show-completion", "--help"])
    for command in COMMANDS:
        assert f"│ {command} " in text


def test_dspark_export() -> None:
    text = shown(exporter.app)
    check(text, options_of(exporter.app))
    panels = set(re.findall(r"^╭─ (.+?) ─", text, re.MULTILINE))
    assert panels == {"Arguments", "Options", "Output", "Drafter", "Precision", "Shapes", "Compile"}


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_defaults_are_those_of_the_api(command: str) -> None:
    parameters = {each.name: each.default for each in typer.main.get_command(runtime.app).commands[command].params}  # type: ignore[attr-defined]
    for name, default in SamplingParams():
        if name in parameters and name not in ("stop", "stop_token_ids", "max_new_tokens"):
            assert parameters[name] == default, name
    assert parameters["max_new_tokens"] == {"generate": SamplingParams().max_new_tokens, "chat": 512}[command]


def test_numbers_of_users_are_those_of_the_benchmark() -> None:
    from dspark.runtime.measuring.load_figures import CONCURRENCIES

    assert f"[default: ({','.join(map(str, CONCURRENCIES))})]" in shown(runtime.app, "bench")
