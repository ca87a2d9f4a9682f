"""Reads printed tables."""

__all__ = ["table_cells"]


def table_cells(text: str) -> dict[tuple[str, str], str]:
    """Cells of all tables by what names their row and their column; heads may be broken over lines."""
    found: dict[tuple[str, str], str] = {}
    heads: list[str] = []
    above = ""
    for line in text.splitlines():
        if line.startswith("┃"):
            parts = [part.strip() for part in line.strip("┃").split("┃")]
            broken = above == "┃"
            heads = [f"{head} {part}".strip() for head, part in zip(heads, parts, strict=True)] if broken else parts
        elif line.startswith("│"):
            name, *row = (part.strip() for part in line.strip("│").split("│"))
            found |= {(name, head): cell for head, cell in zip(heads[1:], row, strict=True)}
        above = line[:1]
    return found
