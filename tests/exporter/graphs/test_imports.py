"""The exporter's modules import each other in one direction, and so does what only a type checker would read."""

import ast
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import dspark.exporter

ROOT = Path(next(iter(dspark.exporter.__path__)))


def modules() -> dict[str, ast.Module]:
    return {
        ".".join(["dspark", "exporter", *file.relative_to(ROOT).with_suffix("").parts]): ast.parse(
            file.read_text(encoding="utf-8")
        )
        for file in ROOT.rglob("*.py")
    }


def imported(node: ast.ImportFrom, known: Collection[str]) -> set[str]:
    """The modules that a statement imports; names that are no modules come from the package itself."""
    names = {f"{node.module}.{each.name}" for each in node.names}
    package = {f"{node.module}", f"{node.module}.__init__"} if names - set(known) else set()
    return (names | package) & set(known)


def test_no_module_imports_itself_through_others() -> None:
    trees = modules()
    assert "dspark.exporter.graphs.builder" in trees
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                graph[name] |= imported(node, trees.keys())
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the circle


def test_only_the_builder_and_encodings_know_how_weights_are_packed() -> None:
    graphs = {name: tree for name, tree in modules().items() if name.startswith("dspark.exporter.graphs.")}
    knowing = {
        name.removeprefix("dspark.exporter.graphs.").partition(".")[0]
        for name, tree in graphs.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "dspark.exporter.packings"
    }
    assert knowing == {"builder", "encodings"}
