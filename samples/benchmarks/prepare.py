"""Installs the peers, each in a virtual environment of its own, and makes their models.

What is there already is kept, so that a run which was broken off can be repeated.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from contestants import CONVERSIONS, ENVIRONMENTS, SHIPPED, Folders


def main(
    gguf: Annotated[Path, typer.Argument(help="SmolLM2-135M-Instruct.Q4_1.gguf, as samples/smollm2/fetch.py gets it.")],
    environments: Annotated[Path, typer.Option(help="Folder for all that is installed and made.")],
    only: Annotated[list[str] | None, typer.Option(help=f"Only {', '.join(ENVIRONMENTS)} and what it makes.")] = None,
) -> None:
    """Installs the peers and makes their models; when one fails, the others are still tried."""
    chosen = list(ENVIRONMENTS) if only is None else only
    unknown = [name for name in chosen if name not in ENVIRONMENTS]
    if unknown:
        sys.exit(f"error: there is no environment {unknown[0]!r}; there are {', '.join(ENVIRONMENTS)}")
    folders = Folders(environments.absolute())
    steps: dict[Path, Callable[[Path], object]] = {folders.model(SHIPPED): partial(shutil.copyfile, gguf)}
    steps |= {folders.root / name: partial(install, name) for name in chosen}
    steps |= {
        folders.model(name): partial(convert, name, folders)
        for name, conversion in CONVERSIONS.items()
        if conversion.environment in chosen
    }
    failed = [str(output) for output, make in steps.items() if not _made(output, make)]
    if failed:
        sys.exit(f"error: could not make {', '.join(failed)}")


def install(name: str, folder: Path) -> None:
    """Makes one environment.

    Raises:
        CalledProcessError: pip failed.
    """
    environment = ENVIRONMENTS[name]
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *environment.requirements], check=True, env={**os.environ, **environment.variables})


def convert(name: str, folders: Folders, output: Path) -> None:
    """Makes one model.

    Raises:
        CalledProcessError: The conversion failed.
        FileNotFoundError: What it needs is not there.
    """
    conversion = CONVERSIONS[name]
    paths = {"source": folders.model(conversion.source), "output": output}
    if not paths["source"].exists():
        raise FileNotFoundError(f"{paths['source']} is not there")
    command = [argument.format_map(paths) for argument in conversion.command]
    subprocess.run(
        [folders.python(conversion.environment), *command], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )


def _made(output: Path, make: Callable[[Path], object]) -> bool:
    """Makes a file or folder unless it is there; what was begun and failed is removed."""
    if output.exists():
        return True
    print(f"Making {output}", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    finished = False
    try:
        make(output)
        finished = True
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
    finally:
        if not finished:  # a half-made one would be taken for a whole one
            _remove(output)
    return finished


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    typer.run(main)
