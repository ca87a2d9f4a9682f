"""What a module's source imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["imports"]


def imports(file: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, wherever in it; not those that only its type checker sees."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield node.module
            if node.module == "dspark":
                yield from (f"dspark.{alias.name}" for alias in node.names)
