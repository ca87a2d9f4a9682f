"""Draws draft tokens inside a graph."""

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.description import Drafter
from dspark.exporter.graphs.builder import INT64, GraphBuilder
from dspark.runtime.bundle.contract import DRAFT_IDS, GREEDY_TEMPERATURE

__all__ = ["DraftSampler", "step_values"]

BIN = 256
"""Tokens per bin of the two-level inverse CDF: two short cumulative sums are faster and rounder than one over V."""
ALMOST_ONE = 1.0 - 1e-6
"""Keeps the drawn mass below the total, so that rounding cannot point past the last token with mass."""


def step_values(g: GraphBuilder, x: ir.Value, length: int) -> list[ir.Value]:
    """``[B, γ, …]`` → γ values ``[B, 1, …]``; the axis of one stays, as dropping it would take one node per value."""
    return g.split(x, [1] * length, axis=1)


class DraftSampler:
    """Draws draft tokens in the graph: argmax, or the inverse CDF of a given uniform number.

    Reads the inputs ``uniform [B, γ]`` and ``temperature [B]`` and computes the outputs ``tokens [B, γ]`` (target ids)
    and ``draft_logits [B, γ, K]``; with candidates also ``draft_ids [B, γ, K]``, their target ids.

    Args:
        g: The graph.
        drafter: For its vocabulary map and its draft length (γ).
        candidates: Draft ids int64 ``[B, γ, K]`` that logits belong to; None if logits are of the whole vocabulary.
    """

    def __init__(self, g: GraphBuilder, drafter: Drafter, candidates: ir.Value | None = None) -> None:
        length = drafter.draft_length
        self._g = g
        self._drafter = drafter
        self._ids: ir.Value | None = None
        if candidates is not None:
            if drafter.draft_vocabulary is None:
                ids = g.op("Identity", candidates)  # an input cannot be an output
            else:
                ids = g.op("Gather", g.constant(drafter.draft_vocabulary), candidates, axis=0)
            self._ids = g.reshape(ids, -1, length * drafter.choices)
            g.output(DRAFT_IDS, ids)
        uniforms = g.op("Min", g.input("uniform"), g.floats(ALMOST_ONE))
        self._uniforms = step_values(g, uniforms, length)
        temperature = g.unsqueeze(g.input("temperature"), 1)
        self._greedy = g.op("Less", temperature, g.floats(GREEDY_TEMPERATURE))
        self._temperature = g.unsqueeze(g.op("Max", temperature, g.floats(GREEDY_TEMPERATURE)), 2)
        self._tokens: list[ir.Value] = []
        self._logits: list[ir.Value] = []

    def draw(self, step: int, logits: ir.Value) -> ir.Value:
        """Target ids ``[B, 1]`` drawn from ``softmax(logits [B, 1, K] / temperature)``, or the argmax when greedy."""
        g, choices = self._g, self._drafter.choices
        with g.scope("sample"):
            greedy = g.op("ArgMax", logits, axis=-1, keepdims=0)
            probabilities = g.op("Softmax", g.op("Div", logits, self._temperature), axis=-1)
            invert = self._invert_in_bins if choices > BIN else self._invert
            token = g.op("Where", self._greedy, greedy, invert(probabilities, self._uniforms[step]))
            if self._ids is not None:
                place = g.op("Add", token, g.ints(step * choices))
                token = g.op("GatherElements", self._ids, place, axis=1)
            elif self._drafter.draft_vocabulary is not None:
                token = g.op("Gather", g.constant(self._drafter.draft_vocabulary), token, axis=0)
        self._tokens.append(token)
        self._logits.append(logits)
        return token

    def output(self) -> None:
        """Makes the drawn tokens and what they were drawn from the graph's outputs."""
        self._g.output("tokens", self._g.op("Concat", *self._tokens, axis=1))
        self._g.output("draft_logits", self._g.op("Concat", *self._logits, axis=1))

    def _invert(self, probabilities: ir.Value, uniform: ir.Value) -> ir.Value:
        """Index ``[B, 1]`` of the first of a few ``[B, 1, n]`` whose cumulative probability exceeds the uniform."""
        g = self._g
        cumulative = g.op("CumSum", probabilities, g.constant(np.int64(2)))
        mass = g.op("Mul", self._last(cumulative, axis=2), g.unsqueeze(uniform, 2))
        return self._count_up_to(cumulative, mass, keepdims=0)

    def _invert_in_bins(self, probabilities: ir.Value, uniform: ir.Value) -> ir.Value:
        """The same for a whole vocabulary: the bin first, then the index in it."""
        g = self._g
        missing = -self._drafter.choices % BIN
        if missing:
            probabilities = g.op("Pad", probabilities, g.ints(0, 0, 0, 0, 0, missing))
        bins = g.reshape(probabilities, 0, -1, BIN)
        bin_cumulative = g.op("CumSum", g.op("ReduceSum", bins, g.ints(2), keepdims=0), g.constant(np.int64(1)))
        mass = g.op("Mul", self._last(bin_cumulative), uniform)
        index = self._count_up_to(bin_cumulative, mass)
        chosen = g.op("GatherND", bins, index, batch_dims=1)
        cumulative = g.op("CumSum", chosen, g.constant(np.int64(1)))
        before = g.op(
            "Sub",
            g.op("GatherND", bin_cumulative, index, batch_dims=1),
            g.op("Squeeze", self._last(cumulative), g.ints(1)),
        )
        rest = g.op("Sub", mass, g.unsqueeze(before, 1))
        rest = g.op("Max", rest, g.floats(0.0))  # rounding must not point before the first token with mass, either
        rest = g.op("Min", rest, g.op("Mul", self._last(cumulative), g.floats(ALMOST_ONE)))
        offset = self._count_up_to(cumulative, rest)
        return g.op("Add", g.op("Mul", index, g.ints(BIN)), offset)

    def _last(self, cumulative: ir.Value, axis: int = 1) -> ir.Value:
        """The last entry along an axis, which stays: the total of a cumulative sum."""
        g = self._g
        return g.op("Slice", cumulative, g.ints(-1), g.ints(np.iinfo(np.int64).max), g.ints(axis))

    def _count_up_to(self, cumulative: ir.Value, mass: ir.Value, keepdims: int = 1) -> ir.Value:
        """How many entries of the last axis are at most ``mass [B, …, 1]``: the index of the first beyond it."""
        g = self._g
        reached = g.op("Cast", g.op("LessOrEqual", cumulative, mass), to=INT64)
        return g.op("ReduceSum", reached, g.ints(-1), keepdims=keepdims)
