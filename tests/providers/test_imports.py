"""The order in which the parts of providers/ build on each other."""

from pathlib import Path

import dspark.providers
from tests.support.imports import imports

ORDER = (
    "errors",
    "names",
    "monitors",
    "session",
    "engine_key",
    "provider",
    "onnxruntime",
    "host",
    "cuda",
    "tensorrt",
    "descriptions",
    "registry",
    "selection",
)
"""Folders and the modules beside them, from the ground up: each imports only what stands before it."""
(TOP,) = map(Path, dspark.providers.__path__)


def part(file: Path) -> str:
    """The folder or module of the package that a file belongs to."""
    return file.relative_to(TOP).parts[0].removesuffix(".py")


def test_the_order_has_every_part() -> None:
    found = {part(file) for file in TOP.rglob("*.py")} - {"__init__"}
    assert found == set(ORDER)


def test_each_part_imports_only_what_stands_before_it() -> None:
    for file in TOP.rglob("*.py"):
        if file == TOP / "__init__.py":  # the public face
            continue
        allowed = ORDER[: ORDER.index(part(file)) + 1]
        for module in imports(file):
            if module.startswith("dspark."):
                assert module.split(".")[1] == "providers", f"{file.relative_to(TOP)} imports {module}"
                assert module.split(".")[2] in allowed, f"{file.relative_to(TOP)} imports {module}"


def test_a_description_imports_no_other() -> None:
    """A device family is changed in one file."""
    for file in (TOP / "descriptions").glob("*.py"):
        assert not [module for module in imports(file) if module.startswith("dspark.providers.descriptions")]
