"""The folder in which the documentation's commands run."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.exporter.export import export_bundle, prepare
from dspark.runtime import DSparkInference
from tests.conftest import CHAT_TEMPLATE, GOLDEN
from tests.docs.blocks import ROOT, Block
from tests.docs.in_process import SCRIPTS, run_here

PROMPTS = ["Why is the sky blue?", "Name three colours.", "Write a haiku.", "What is 2 + 2?"]
RunBlock = Callable[[Block], None]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the names that the documentation uses: a model, a drafter, their bundle, prompts, samples."""
    folder = tmp_path_factory.mktemp("docs") / "template"
    model = shutil.copytree(GOLDEN / "qwen3_target", folder / "my-model")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    drafter = shutil.copytree(GOLDEN / "dspark_vanilla", folder / "my-drafter")
    export_bundle(prepare(model, drafter, folder / "bundle"))
    DSparkInference.load(folder / "bundle", profile="pro").close()  # measures what steps cost, once for all pages
    _write_prompts(folder / "prompts.jsonl", PROMPTS[:2])
    _write_prompts(
        folder / "other-prompts.jsonl", [f"{prompt} Say it {times} times." for times in range(6) for prompt in PROMPTS]
    )
    samples = folder / "samples"
    (samples / "prompts").mkdir(parents=True)
    for path in (ROOT / "samples").iterdir():
        if path.name != "prompts":
            (samples / path.name).symlink_to(path)
    for path in (ROOT / "samples" / "prompts").iterdir():  # the golden model reads short texts only
        _write_prompts(samples / "prompts" / path.name, PROMPTS[:2])
    (folder / "examples").symlink_to(ROOT / "examples")
    _write_commands(folder / ".bin")
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    """A copy of the folder, for one page."""
    return shutil.copytree(template, tmp_path / "folder", symlinks=True)


@pytest.fixture
def run_in_shell(folder: Path, tmp_path: Path) -> RunBlock:
    """Runs blocks one after the other, as someone does who follows the page: in a shell, with new interpreters."""
    environment = {**os.environ, "PATH": f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    interpreters = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": ["python", "-c"]}

    def run(block: Block) -> None:
        command = [*interpreters[block.language], block.text]
        ended = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, f"{block.place}:\n{block.text}\n{ended.stdout}\n{ended.stderr}"

    return run


@pytest.fixture
def run_quickly(folder: Path, run_in_shell: RunBlock, monkeypatch: pytest.MonkeyPatch) -> RunBlock:
    """The same in this process, but for blocks that need a shell."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def run(block: Block) -> None:
        if not run_here(block, monkeypatch):
            run_in_shell(block)

    return run


def _write_prompts(file: Path, prompts: list[str]) -> None:
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def _write_commands(folder: Path) -> None:
    """The project's commands and ``python``, as this interpreter has them."""
    folder.mkdir()
    calls = {name: f"-c 'from {place.replace(':', ' import ')}; main()'" for name, place in SCRIPTS.items()}
    for name, arguments in {**calls, "python": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (folder / name).chmod(0o755)
