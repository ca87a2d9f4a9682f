"""What the shell is offered, and how long it waits for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.providers.names import PROVIDER_NAMES, provider_names
from dspark.providers.registry import PROVIDERS
from dspark.runtime.commands.completion import complete_provider, complete_schedulers

RUN = "from dspark.runtime.commands.app import main; main()"
EXPORT = "from dspark.exporter.cli import main; main()"
TELL_HEAVY = """
import atexit, sys
heavy = ("numpy", "onnxruntime", "onnx", "onnx_ir", "tokenizers", "yaml")
atexit.register(lambda: print([name for name in heavy if name in sys.modules], file=sys.stderr))
"""
COLD_SECONDS = 2.5


def complete(*words: str, shell: str = "bash", code: str = RUN, name: str = "dspark-run") -> list[str]:
    """What the shell gets for a line whose last word is not finished; nothing heavy may be loaded for it."""
    variables = {
        f"_{name.replace('-', '_').upper()}_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": " ".join([name, *words]),
        "COMP_CWORD": str(len(words)),
        "_TYPER_COMPLETE_ARGS": " ".join([name, *words]),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", TELL_HEAVY + code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr.strip() == "[]"
    return done.stdout.split("\n") if shell != "bash" else done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ge"], {"generate"}),
        (["c"], {"chat", "calibrate", "compare"}),
        (["generate", "bundle", "--max"], {"--max-new-tokens", "--max-draft-tokens"}),
        (["bench", "bundle", "--sched"], {"--scheduler", "--schedulers"}),
        (["generate", "bundle", "--scheduler", "hard"], {"hardware", "hardware-async"}),
        (["chat", "bundle", "--profile", "f"], {"flash"}),
        (["evaluate", "bundle", "--provider", "tensor"], {"tensorrt", "tensorrt-rtx", "tensorrt-ort"}),
        (["bench", "bundle", "--schedulers", "off,fi"], {"off,fixed"}),
    ],
)
def test_dspark_run(words: list[str], offered: set[str]) -> None:
    assert set(complete(*words)) == offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["target", "--dr"], {"--drafter", "--draft-precision", "--draft-vocabulary", "--draft-vocabulary-from"}),
        (["target", "--precision", "int8-"], {"int8-blocks", "int8-weights"}),
        (["target", "--cache-form", ""], {"in-place", "delta"}),
        (["target", "--compile", "q"], {"qnn"}),
    ],
)
def test_dspark_export(words: list[str], offered: set[str]) -> None:
    found = set(complete(*words, code=EXPORT, name="dspark-export"))
    assert found - {"--draft-top-k"} == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str) -> None:
    assert "hardware-async" in " ".join(complete("generate", "bundle", "--scheduler", "hardware-", shell=shell))


@pytest.mark.parametrize(("code", "name"), [(RUN, "dspark-run"), (EXPORT, "dspark-export")])
def test_the_script_is_shown_and_installed(code: str, name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown, installed = (
        subprocess.run(
            [sys.executable, "-c", code, option, "bash"], env=environment, capture_output=True, text=True, timeout=60
        )
        for option in ("--show-completion", "--install-completion")
    )
    assert shown.returncode == installed.returncode == 0, shown.stderr + installed.stderr
    assert f"_{name.replace('-', '_').upper()}_COMPLETE=complete_bash" in shown.stdout
    (script,) = tmp_path.rglob(f"{name}.sh")
    assert shown.stdout.strip() in script.read_text()


@pytest.mark.parametrize("code", [RUN, EXPORT])
def test_help_comes_at_once(code: str) -> None:
    """In processor time: others may be at work on this machine."""

    def spent() -> float:
        times = os.times()
        return times.children_user + times.children_system

    before = spent()
    done = subprocess.run([sys.executable, "-c", TELL_HEAVY + code, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert spent() - before < COLD_SECONDS


def test_the_names_are_those_of_the_registry() -> None:
    assert tuple(provider.name for provider in PROVIDERS) == PROVIDER_NAMES


def test_a_provider_of_another_package_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "mine-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[dspark.providers]\nmine = no_such_module:MINE\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert provider_names() == [*PROVIDER_NAMES, "mine"]
    assert complete_provider("mi") == ["migraphx", "mine"]


def test_a_graph_before_a_provider() -> None:
    assert complete_provider("head=c") == [f"head={name}" for name in ("cpu", "cuda", "cann", "coreml")]
    assert complete_schedulers("") == ["hardware", "hardware-async", "threshold", "fixed", "off"]
