"""Pictures of reports, drawn by matplotlib, which is an extra of the package."""

from collections.abc import Callable
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["can_draw", "picture"]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def picture(size: tuple[float, float], draw: "Callable[[Figure], None]") -> bytes:
    """A picture as PNG, the same bytes for the same content.

    Args:
        size: Width and height in inches.
        draw: Fills the figure.
    """
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
    return content.getvalue()
