"""Draws the plots of the documentation from ``figures.json``: ``python docs/plots.py``."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PAPER, INK, GRID = "#f7f8fa", "#1d2433", "#d5dae2"
BLUE, GREEN, AMBER = "#5b7bb5", "#3d8f5d", "#d99a1c"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.facecolor": PAPER,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "figure.facecolor": PAPER,  # a ground of their own: the plots read alike on light and dark pages
    "font.size": 11,
    "grid.color": GRID,
    "svg.fonttype": "path",
    "svg.hashsalt": "dspark",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def main() -> None:
    """Draws all of them."""
    figures = json.loads((HERE / "figures.json").read_text(encoding="utf-8"))
    mpl.use("svg")
    with mpl.rc_context(STYLE):
        _save(_speed_up(figures["speed_up"], figures["acceptance"]), "speed-up.svg")
        _save(_load(figures["load"]), "load.svg")


def _speed_up(speed_up: dict[str, Any], acceptance: dict[str, Any]) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(2, 3), layout="constrained")
    bars = left.bar(speed_up["precisions"], speed_up["gain"], color=BLUE, width=0.55)
    left.bar_label(bars, fmt="%.2f ×", padding=3, fontweight="bold")
    left.axhline(1, color=INK, linewidth=1, linestyle="--")
    left.text(2.4, 1, " plain", va="bottom")
    left.set(title="Speed-up, mean of six files", ylim=(0, 1.6), yticks=[], xlim=(-0.5, 3))
    left.spines["left"].set_visible(False)
    bars = right.barh(acceptance["files"], acceptance["length"], color=GREEN, height=0.62)
    right.bar_label(bars, fmt="%.2f", padding=3)
    right.axvline(1, color=INK, linewidth=1, linestyle="--")
    right.text(1, -0.62, "plain ", ha="right", va="center")
    right.set(title="Acceptance length, tokens per round", xlim=(0, 2.8), ylim=(-0.9, 5.5), xticks=[])
    right.spines["bottom"].set_visible(False)
    return figure


def _load(load: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    styles = {"off": (AMBER, "s", "--"), "best fixed": (GREEN, "^", ":"), "hardware": (BLUE, "o", "-")}
    for axis, precision in zip(axes, ("fp32", "int8"), strict=True):
        for name, (colour, marker, line) in styles.items():
            axis.plot(load["users"], load[precision][name], line, color=colour, marker=marker, label=name, linewidth=2)
        axis.set_xscale("log", base=2)
        axis.set(title=precision, xlabel="users", ylim=(0, 180), xticks=load["users"])
        axis.set_xticklabels(map(str, load["users"]))
        axis.grid(axis="y")
    axes[0].set_ylabel("tokens per second, all users")
    axes[1].legend(frameon=False, loc="lower right")
    return figure


def _save(figure: Any, name: str) -> None:
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    figure.savefig(HERE / "assets" / name, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
