"""What the archives hold, built from this checkout as ``make wheel`` builds them."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.release.check import in_sdist, in_wheel, place, sources

BUILD = "from setuptools import build_meta as build; build.build_wheel('dist'); build.build_sdist('dist')"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives, built in a copy of the checkout: what a build leaves there is not for the next one."""
    folder = tmp_path_factory.mktemp("checkout") / "copy"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.safetensors", "*.npz")
    shutil.copytree(ROOT, folder, ignore=skipped)
    (folder / "dist").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True, timeout=120)
    return folder / "dist"


@pytest.fixture
def wheel(dist: Path, tmp_path: Path) -> Path:
    (built,) = dist.glob("*.whl")
    return Path(shutil.copy(built, tmp_path))


def without(wheel: Path, name: str) -> None:
    """Takes a file out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        files = {one: archive.read(one) for one in archive.namelist()}
    files.pop(name)
    with zipfile.ZipFile(wheel, "w") as archive:
        for one, content in files.items():
            archive.writestr(one, content)


def test_both_hold_the_packages_with_their_data_and_nothing_else(dist: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert in_wheel(wheel) == []
    assert in_sdist(sdist) == []


def test_files_have_their_places() -> None:
    """Written out, for the check and the wheel are to agree with more than each other."""
    places = {place(file) for file in sources()}
    for package in ("configs", "exporter", "providers", "runtime"):
        assert {f"dspark/{package}/__init__.py", f"dspark/{package}/py.typed"} <= places
    assert "optimum/commands/register/register_dspark.py" in places
    assert "dspark/runtime/evaluation/report.html.jinja" in places
    assert {f"dspark/configs/{name}" for name in ("flash.yaml", "pro.yaml", "bench_prompts.jsonl")} <= places
    assert not [file for file in places if not file.startswith(("dspark/", "optimum/"))]


@pytest.mark.parametrize("name", ["dspark/runtime/py.typed", "dspark/configs/flash.yaml", "dspark/exporter/cli.py"])
def test_a_missing_file_is_noticed(name: str, wheel: Path) -> None:
    without(wheel, name)
    assert in_wheel(wheel) == [f"{name} is missing"]


@pytest.mark.parametrize("name", ["tests/conftest.py", "dspark/runtime/__pycache__/errors.cpython-311.pyc"])
def test_a_file_too_many_is_noticed(name: str, wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(name, "")
    assert in_wheel(wheel) == [f"{name} does not belong here"]


@pytest.mark.parametrize(
    ("file", "content", "fact"),
    [
        ("entry_points.txt", "[console_scripts]\ndspark-run = dspark.runtime:main\n", "commands is"),
        ("licenses/LICENSE", "MIT", "text of the licence is"),
        ("METADATA", "Name: dspark-onnx\nVersion: 0.0.1\n", "version is '0.0.1', not"),
    ],
)
def test_wrong_metadata_are_noticed(file: str, content: str, fact: str, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(f".dist-info/{file}"))
    without(wheel, name)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(name, content)
    assert any(problem.startswith(fact) for problem in in_wheel(wheel))


def test_tests_among_the_sources_are_noticed(dist: Path, tmp_path: Path) -> None:
    (built,) = dist.glob("*.tar.gz")
    sdist = tmp_path / built.name
    with tarfile.open(built) as old, tarfile.open(sdist, "w:gz") as new:
        for member in old:
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
        new.add(__file__, f"{built.name.removesuffix('.tar.gz')}/tests/test_archives.py")
    assert in_sdist(sdist) == ["tests/test_archives.py does not belong here"]
