"""The sequential head: repairs a block's base logits left to right, samples, and rates every token.

SEMANTICS: sequential heads; the paper's section on semi-autoregressive drafting.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.description import ConfidenceInput, Drafter, HeadKind
from dspark.exporter.graphs.builder import FLOAT, INT64, GraphBuilder
from dspark.exporter.graphs.encodings import Encodings
from dspark.exporter.graphs.layers import linear, unsqueeze
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.contract import CANDIDATES, DRAFT_IDS, GREEDY_TEMPERATURE

__all__ = ["DraftSampler", "build_head"]

BIN = 256
"""Tokens a bin of the two-level inverse CDF: two short cumulative sums are faster and rounder than one over V."""
W2 = "markov_head.markov_w2"
ALMOST_ONE = 1.0 - 1e-6
"""Keeps the drawn mass below the total, so that rounding cannot point past the last token with mass."""


def build_head(drafter: Drafter, weights: WeightFile, encodings: Encodings) -> ir.Model:
    """Builds the head's graph, unrolled over the block (inputs and outputs in ARCHITECTURE.md, "The graphs").

    Args:
        drafter: A DSpark or DFlash drafter; without a sequential head the graph only samples.
        weights: Receives the weights.
        encodings: How they are stored and multiplied with.
    """
    g = GraphBuilder("head", weights, encodings)
    length, width, choices = drafter.draft_length, drafter.backbone.hidden_size, drafter.choices
    hidden = g.input("hidden", FLOAT, "B", length, width)
    base_steps = step_values(g, g.input("base_logits", FLOAT, "B", length, choices), length)
    candidates = None if drafter.top_k is None else g.input(CANDIDATES, INT64, "B", length, choices)
    previous = unsqueeze(g, g.input("anchor_ids", INT64, "B"), 1)
    sampler = DraftSampler(g, drafter, length, candidates)
    repair = _Repair(g, drafter, hidden, candidates)
    logits_steps, embeddings = [], []
    for step in range(length):
        with g.scope(f"step.{step}"):
            embedding = repair.embedding(previous)
            logits = repair.apply(step, base_steps[step], embedding)
            embeddings.append(embedding)
            previous = sampler.draw(step, logits)
            logits_steps.append(logits)
    sampler.output_tokens()
    g.output("draft_logits", g.op("Concat", *logits_steps, axis=1), FLOAT, "B", length, choices)
    if drafter.confidence is not ConfidenceInput.NONE:
        g.output("confidence", repair.confidence(embeddings), FLOAT, "B", length)
    return g.model()


def step_values(g: GraphBuilder, x: ir.Value, length: int) -> list[ir.Value]:
    """``[B, γ, …]`` → γ values ``[B, 1, …]``; the axis of one stays, as dropping it would be a node a value."""
    return g.split(x, [1] * length, axis=1)


class DraftSampler:
    """Draws draft tokens in the graph: argmax, or the inverse CDF of a given uniform number.

    Declares the inputs ``uniform [B, γ]`` and ``temperature [B]`` and the output ``tokens [B, γ]`` (target ids); with
    candidates also ``draft_ids [B, γ, K]``, their target ids.

    Args:
        g: The graph.
        drafter: For its vocabulary map.
        length: Draft tokens (γ).
        candidates: Draft ids int64 ``[B, γ, K]`` that logits belong to; None if logits are of the whole vocabulary.
    """

    def __init__(self, g: GraphBuilder, drafter: Drafter, length: int, candidates: ir.Value | None = None) -> None:
        self._g = g
        self._drafter = drafter
        self._length = length
        self._ids: ir.Value | None = None
        if candidates is not None:
            if drafter.draft_vocabulary is None:
                ids = g.op("Identity", candidates)  # an input cannot be an output
            else:
                ids = g.op("Gather", g.constant(drafter.draft_vocabulary), candidates, axis=0)
            self._ids = g.reshape(ids, -1, length * drafter.choices)
            g.output(DRAFT_IDS, ids, INT64, "B", length, drafter.choices)
        uniforms = g.op("Min", g.input("uniform", FLOAT, "B", length), g.floats(ALMOST_ONE))
        self._uniforms = step_values(g, uniforms, length)
        temperature = unsqueeze(g, g.input("temperature", FLOAT, "B"), 1)
        self._greedy = g.op("Less", temperature, g.floats(GREEDY_TEMPERATURE))
        self._temperature = unsqueeze(g, g.op("Max", temperature, g.floats(GREEDY_TEMPERATURE)), 2)
        self._tokens: list[ir.Value] = []

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
        return token

    def output_tokens(self) -> None:
        """Declares the tokens drawn so far as the graph's output."""
        self._g.output("tokens", self._g.op("Concat", *self._tokens, axis=1), INT64, "B", self._length)

    def _invert(self, probabilities: ir.Value, uniform: ir.Value) -> ir.Value:
        """Index ``[B, 1]`` of the first of a few ``[B, 1, n]`` whose cumulative probability exceeds the uniform."""
        g = self._g
        cumulative = g.op("CumSum", probabilities, g.constant(np.int64(2)))
        mass = g.op("Mul", self._last(cumulative, axis=2), unsqueeze(g, uniform, 2))
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
        rest = g.op("Sub", mass, unsqueeze(g, before, 1))
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


class _Repair:
    """The learned part of the head: Markov bias and confidence (SEMANTICS: sequential heads).

    A step's values keep the axis of their step: ``[B, 1, …]``.
    """

    def __init__(self, g: GraphBuilder, drafter: Drafter, hidden: ir.Value, candidates: ir.Value | None) -> None:
        self._g = g
        self._drafter = drafter
        self._rank = drafter.markov_rank
        self._tensors = drafter.tensors
        self._hidden = hidden
        self._hidden_steps: list[ir.Value] = []
        self._state: ir.Value | None = None
        self._candidate_rows: list[ir.Value] | None = None
        if drafter.head in (HeadKind.GATED, HeadKind.RNN):
            self._hidden_steps = step_values(g, hidden, drafter.draft_length)
        if candidates is not None and drafter.head is not HeadKind.NONE:
            rows = self._look_up(W2, g.reshape(candidates, -1, drafter.draft_length * drafter.choices))
            self._candidate_rows = g.split(rows, [drafter.choices] * drafter.draft_length, axis=1)

    def embedding(self, previous: ir.Value) -> ir.Value | None:
        """``W1[previous] [B, 1, r]``; None without a sequential head."""
        if self._drafter.head is HeadKind.NONE:
            return None
        return self._look_up("markov_head.markov_w1", previous)

    def apply(self, step: int, logits: ir.Value, embedding: ir.Value | None) -> ir.Value:
        """Base logits ``[B, 1, K]`` plus the head's bias for one slot."""
        if embedding is None:
            return logits
        g = self._g
        match self._drafter.head:
            case HeadKind.GATED:
                chosen = self._gated(embedding, self._hidden_steps[step])
            case HeadKind.RNN:
                chosen = self._rnn(embedding, self._hidden_steps[step])
            case _:
                chosen = embedding
        if self._candidate_rows is None:
            bias = self._linear(W2, chosen, self._rank, self._drafter.choices)
        else:  # ONNX Runtime's product takes the transposition in
            bias = g.op("MatMul", chosen, g.op("Transpose", self._candidate_rows[step], perm=[0, 2, 1]))
        return g.op("Add", logits, bias)

    def confidence(self, embeddings: Sequence[ir.Value | None]) -> ir.Value:
        """Confidence logits ``[B, γ]``; a slot's depends only on tokens before its own."""
        g, length = self._g, len(embeddings)
        seen, width = self._hidden, self._drafter.backbone.hidden_size
        if self._drafter.confidence is ConfidenceInput.HIDDEN_AND_MARKOV:
            before = g.op("Concat", *[embedding for embedding in embeddings if embedding is not None], axis=1)
            seen, width = g.op("Concat", seen, before, axis=-1), width + self._rank
        rated = linear(g, g.reshape(seen, -1, width), self._tensors, "confidence_head.proj")
        return g.reshape(rated, -1, length)

    def _gated(self, embedding: ir.Value, hidden: ir.Value) -> ir.Value:
        g, width = self._g, self._drafter.backbone.hidden_size + self._rank
        gate = self._linear("markov_head.gate_proj", g.op("Concat", hidden, embedding, axis=-1), width, self._rank)
        return g.op("Mul", g.op("Sigmoid", gate), embedding)

    def _rnn(self, embedding: ir.Value, hidden: ir.Value) -> ir.Value:
        g, width = self._g, self._drafter.backbone.hidden_size + 2 * self._rank
        state = self._state or g.op("Sub", embedding, embedding)  # s₀ = 0 at each block
        seen = g.op("Concat", state, embedding, hidden, axis=-1)
        joint = self._linear("markov_head.joint_proj", seen, width, 3 * self._rank)
        gate, candidate, output = g.split(joint, [self._rank] * 3)
        gate = g.op("Sigmoid", gate)
        kept = g.op("Mul", gate, state)
        self._state = g.op("Add", kept, g.op("Mul", g.op("Sub", g.floats(1.0), gate), g.op("Tanh", candidate)))
        return g.op("Tanh", output)

    def _look_up(self, name: str, ids: ir.Value) -> ir.Value:
        """Rows ``[B, n, r]`` of a table of the head for ids ``[B, n]``."""
        key = f"{name}.weight"
        return self._g.encodings.head_tables.look_up(self._g, ids, key, self._tensors[key])

    def _linear(self, name: str, x: ir.Value, inputs: int, outputs: int) -> ir.Value:
        """A linear layer over ``[B, 1, inputs]``."""
        g = self._g
        return g.reshape(linear(g, g.reshape(x, -1, inputs), self._tensors, name), -1, 1, outputs)
