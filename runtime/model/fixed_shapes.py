"""Bundles of fixed shapes: which shapes each graph is called with, and sessions that hold one shape each.

A verification step always computes ``block`` tokens of ``batch`` requests, a prefill step ``chunk`` tokens of one, and
the cache has one of a few lengths. Unused positions are padded, and their results are never read. So a device that
takes graphs of fixed shapes only compiles each graph a few times, and never again.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from dspark.providers import Call, ProviderError, Session
from dspark.runtime.bundle.manifest import Manifest

__all__ = ["Dimensions", "FixedShapeSession", "graph_dimensions"]

Dimensions = Mapping[str, int]
"""Values of a graph's symbolic dimensions (docs/reference/graphs.md)."""
logger = logging.getLogger(__name__)


def graph_dimensions(manifest: Manifest, graph: str) -> list[dict[str, int]]:
    """The dimensions of all shapes that a bundle of fixed shapes calls a graph with, those of short caches first."""
    shapes, drafter = manifest.shapes, manifest.drafter
    assert shapes is not None
    if graph == "head":
        return [{"B": shapes.batch}]
    if graph == "drafter" and drafter is not None and drafter.kind != "eagle3":
        return [{"B": shapes.batch, "S": capacity} for capacity in shapes.capacities]
    plan: list[dict[str, int]] = []
    for capacity in shapes.capacities:
        for requests, width in ((1, shapes.chunk), (shapes.batch, shapes.block)):
            sizes = {"B": requests, "T": width, "S": capacity, "S+T": capacity + width}
            if graph == "target":
                scored = 1 if width == shapes.chunk and requests == 1 else requests * width
                sizes |= {"N": requests * width, "K": scored}
            plan.append(sizes)
    return plan


class FixedShapeSession:
    """A graph that is loaded once for each shape it is called with.

    Args:
        graph: The graph's name.
        plan: The dimensions of all its shapes.
        load: Loads it with some.

    Attributes:
        loaded: How many shapes have been loaded, which compiles them unless they were compiled before.
    """

    def __init__(self, graph: str, plan: Sequence[Dimensions], load: Callable[[Dimensions], Session]) -> None:
        self._graph = graph
        self._plan = plan
        self._load = load
        self._sessions: dict[tuple[tuple[str, int], ...], Session] = {}
        self._lock = threading.Lock()
        shortest = min((sizes.get("S", 0) for sizes in plan), default=0)
        for sizes in plan:
            if sizes.get("S", 0) == shortest:  # a graph that cannot be compiled must show now, not within a text
                self._session(sizes)

    @property
    def loaded(self) -> int:
        """Shapes that have been loaded."""
        return len(self._sessions)

    def bind(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> Call:
        """Binds the arrays to the session of their shapes, which is loaded now if it has not been.

        Raises:
            ProviderError: The shapes are none of the bundle's, or cannot be loaded.
        """
        sizes = _sizes(inputs)
        for planned in self._plan:
            if all(planned.get(name, size) == size for name, size in sizes.items()):
                return self._session(planned).bind(inputs, outputs)
        possible = "; ".join(map(_shown, self._plan))
        raise ProviderError(f"the {self._graph} graph was made for fixed shapes ({possible}), not for {_shown(sizes)}")

    def _session(self, sizes: Dimensions) -> Session:
        key = tuple(sorted(sizes.items()))
        with self._lock:
            if key not in self._sessions:
                count, most = len(self._sessions) + 1, len(self._plan)
                logger.info("%s: loading shape %d of at most %d (%s)", self._graph, count, most, _shown(sizes))
                self._sessions[key] = self._load(sizes)
            return self._sessions[key]


def _shown(sizes: Dimensions) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _sizes(inputs: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """The dimensions that inputs have."""
    sizes: dict[str, int] = {}
    if "pad_index" in inputs:  # the target
        sizes["B"], sizes["T"] = inputs["pad_index"].shape
        sizes["N"], sizes["K"] = len(inputs["input_ids"]), len(inputs["logits_index"])
    elif "input_ids" in inputs:  # an EAGLE-3 drafter
        sizes["B"], sizes["T"] = inputs["input_ids"].shape
    else:
        sizes["B"] = len(inputs["anchor_ids"])
    cached = next((array for name, array in inputs.items() if name.startswith(("past.", "context."))), None)
    if cached is not None and cached.ndim == 4:
        sizes["S"] = cached.shape[2]
    return sizes
