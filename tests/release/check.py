"""Checks what is about to be released: what the archives hold, and that an installed wheel runs the demo.

Usage: python -m tests.release.check DIST GGUF
"""

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "samples" / "smollm2"
HOMES = {  # folder of the checkout → folder of the wheel, the more special first
    "exporter/optimum_register": "optimum/commands/register",
    "configs": "dspark/configs",
    "exporter": "dspark/exporter",
    "providers": "dspark/providers",
    "runtime": "dspark/runtime",
}
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
DESCRIPTION = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}


def main(dist: Path, gguf: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    problems = [f"{wheel.name}: {each}" for each in in_wheel(wheel)]
    problems += [f"{sdist.name}: {each}" for each in in_sdist(sdist)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{wheel.name} and {sdist.name} hold the packages with their data, and nothing else")
    with tempfile.TemporaryDirectory() as folder:
        run_demo(wheel.resolve(), gguf.resolve(), Path(folder))


def in_wheel(wheel: Path) -> list[str]:
    """What is wrong with a wheel's contents: its files are those of the packages, its metadata those of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    information = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        expected = {place(file) for file in sources()} | {f"{information}/{name}" for name in METADATA}
        problems = differences(names, expected)
        if problems:
            return problems
        metadata = message_from_string(archive.read(f"{information}/METADATA").decode())
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(f"{information}/entry_points.txt").decode())
        licence = archive.read(f"{information}/licenses/LICENSE")
    facts = {
        "name": (metadata["Name"], project["name"]),
        "version": (metadata["Version"], project["version"]),
        "Python": (metadata["Requires-Python"], project["requires-python"]),
        "licence": (metadata["License-Expression"], project["license"]),
        "extras": (metadata.get_all("Provides-Extra"), list(project["optional-dependencies"])),
        "commands": (dict(scripts["console_scripts"]), project["scripts"]),
        "text of the licence": (licence, (ROOT / "LICENSE").read_bytes()),
    }
    return [f"{fact} is {there!r}, not {here!r}" for fact, (there, here) in facts.items() if there != here]


def in_sdist(sdist: Path) -> list[str]:
    """What is wrong with the contents of an archive of sources: it holds what a wheel is built from."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return differences({name for name in names if ".egg-info/" not in name}, {*sources(), *DESCRIPTION})


def sources() -> list[str]:
    """The files of the packages, relative to the checkout."""
    folders = [ROOT / name for name in HOMES if "/" not in name]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return [file.relative_to(ROOT).as_posix() for file in files if "__pycache__" not in file.parts]


def place(source: str) -> str:
    """Where a wheel has a file of the checkout."""
    home = next(home for home in HOMES if source.startswith(f"{home}/"))
    return HOMES[home] + source.removeprefix(home)


def differences(found: set[str], expected: set[str]) -> list[str]:
    return [
        *(f"{name} is missing" for name in sorted(expected - found)),
        *(f"{name} does not belong here" for name in sorted(found - expected)),
    ]


def run_demo(wheel: Path, gguf: Path, folder: Path) -> None:
    """Installs a wheel into a fresh environment, exports SmolLM2 with its drafter, and generates with both.

    Args:
        wheel: The wheel.
        gguf: SmolLM2.
        folder: An empty folder outside the checkout, where all of it happens.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    programs = folder / "venv" / "bin"
    bundle = folder / "bundle"

    def run(program: str, *arguments: str | Path, inside: Path = programs) -> str:
        print("+", program, *arguments, flush=True)
        command = [str(inside / program), *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    shutil.copytree(SMOLLM2, folder / "samples" / "smollm2")
    shutil.copytree(SMOLLM2.parent / "prompts", folder / "samples" / "prompts")
    run("python", "-m", "venv", folder / "venv", inside=Path(sys.executable).parent)
    run("pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[cpu,export]")
    where = Path(run("python", "-c", "import dspark.runtime; print(dspark.runtime.__file__)").strip())
    if not where.is_relative_to(folder / "venv"):
        sys.exit(f"dspark.runtime comes from {where}, not from the wheel")
    print(run("dspark-run", "--version"), run("dspark-export", "--version"), sep="", end="")
    drafter, texts = (Path("samples", "smollm2", name) for name in ("drafter", "conversations.npz"))
    vocabulary = ["--draft-vocabulary", "8192", "--draft-vocabulary-from", texts, "--draft-top-k", "64"]
    print(run("dspark-export", gguf, "--drafter", drafter, "--output", bundle, *vocabulary))
    said = run("python", Path("samples", "smollm2", "demo.py"), bundle)
    print(said)
    if "Outputs are identical" not in said:
        sys.exit("speculation changed the text")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
