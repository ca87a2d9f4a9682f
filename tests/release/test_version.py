"""The version stands in ``pyproject.toml``; everything else reads it from there."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.configs import DISTRIBUTION, own_version
from dspark.providers import find_provider
from dspark.runtime import Bundle
from dspark.runtime.costs.store import cost_key
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = ("jinja2", "numpy", "onnx", "onnx_ir", "onnxruntime", "tokenizers", "torch", "yaml")


def test_what_is_installed_is_this_version() -> None:
    assert (DISTRIBUTION, own_version()) == (PROJECT["name"], PROJECT["version"])


def test_the_newest_changes_are_those_of_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == PROJECT["version"]
    assert len(set(headings)) == len(headings)


@pytest.mark.parametrize("command", sorted(PROJECT["scripts"]))
def test_commands_say_it_at_once(command: str) -> None:
    """Before anything heavy is loaded, and without the arguments that they need."""
    module = PROJECT["scripts"][command].partition(":")[0]
    code = f"""
import json, sys
from {module} import main
try:
    main()
finally:
    print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    arguments = [sys.executable, "-c", code, "--version"]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    said, loaded = ended.stdout.splitlines()
    assert (ended.returncode, said, ended.stderr) == (0, f"{command} {PROJECT['version']}", "")
    assert json.loads(loaded) == []


def test_bundles_and_cost_tables_name_it(golden_bundle: Callable[[str], Path]) -> None:
    bundle = Bundle.open(golden_bundle("dspark_vanilla"))
    key = cost_key(bundle, find_provider("cpu"), threads=1)
    assert bundle.manifest.producer[PROJECT["name"]] == PROJECT["version"]
    assert key.versions[PROJECT["name"]] == PROJECT["version"]
