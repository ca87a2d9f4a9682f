"""The folder in which the documentation's commands run."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.exporter.export import export_bundle, prepare
from dspark.runtime import DSparkInference
from tests.conftest import CHAT_TEMPLATE, GOLDEN
from tests.docs.blocks import ROOT, Block

PROMPTS = ["Why is the sky blue?", "Name three colours.", "Write a haiku.", "What is 2 + 2?"]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the names that the documentation uses: a model, a drafter, their bundle, prompts, samples."""
    folder = tmp_path_factory.mktemp("docs") / "template"
    model = shutil.copytree(GOLDEN / "qwen3_target", folder / "my-model")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    drafter = shutil.copytree(GOLDEN / "dspark_vanilla", folder / "my-drafter")
    export_bundle(prepare(model, drafter, folder / "bundle"))
    DSparkInference.load(folder / "bundle")  # measures what steps cost, once for all pages
    _write_prompts(folder / "prompts.jsonl", PROMPTS)
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
def run_block(template: Path, tmp_path: Path) -> Callable[[Block], None]:
    """Runs blocks of code in a copy of the folder, one after the other, as someone does who follows the page."""
    folder = shutil.copytree(template, tmp_path / "folder", symlinks=True)
    environment = {**os.environ, "PATH": f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    interpreters = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": ["python", "-c"]}

    def run(block: Block) -> None:
        command = [*interpreters[block.language], block.text]
        ended = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, f"{block.place}:\n{block.text}\n{ended.stdout}\n{ended.stderr}"

    return run


def _write_prompts(file: Path, prompts: list[str]) -> None:
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def _write_commands(folder: Path) -> None:
    """The project's commands and ``python``, as this interpreter has them."""
    folder.mkdir()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    calls = {name: f"-c 'from {place.replace(':', ' import ')}; main()'" for name, place in scripts.items()}
    for name, arguments in {**calls, "python": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (folder / name).chmod(0o755)
