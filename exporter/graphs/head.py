"""The sequential head: repairs a block's base logits left to right, samples, and rates every token.

SEMANTICS: sequential heads; the paper's section on semi-autoregressive drafting.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dspark.exporter.checkpoints.description import ConfidenceInput, Drafter, HeadKind
from dspark.exporter.graphs.builder import FLOAT, INT64, GraphBuilder
from dspark.exporter.graphs.encodings import Encodings
from dspark.exporter.graphs.layers import embed, linear, unsqueeze
from dspark.exporter.weights import WeightFile
from dspark.runtime.contract import CANDIDATES, DRAFT_IDS, GREEDY_TEMPERATURE

__all__ = ["DraftSampler", "build_head", "step_values"]

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
    base_logits = g.input("base_logits", FLOAT, "B", length, choices)
    candidates = None if drafter.top_k is None else g.input(CANDIDATES, INT64, "B", length, choices)
    previous = g.input("anchor_ids", INT64, "B")
    sampler = DraftSampler(g, drafter, length, candidates)
    hidden_steps, base_steps = step_values(g, hidden, length), step_values(g, base_logits, length)
    repair = _Repair(g, drafter, candidates)
    logits_steps, embeddings = [], []
    for step in range(length):
        with g.scope(f"step.{step}"):
            embedding = repair.embedding(previous)
            logits = repair.apply(step, base_steps[step], embedding, hidden_steps[step])
            embeddings.append(embedding)
            previous = sampler.draw(step, logits)
            logits_steps.append(unsqueeze(g, logits, 1))
    sampler.output_tokens()
    g.output("draft_logits", g.op("Concat", *logits_steps, axis=1), FLOAT, "B", length, choices)
    if drafter.confidence is not ConfidenceInput.NONE:
        g.output("confidence", repair.confidence(hidden, embeddings), FLOAT, "B", length)
    return g.model()


def step_values(g: GraphBuilder, x: ir.Value, length: int) -> list[ir.Value]:
    """``[B, γ, …]`` → γ values ``[B, …]``."""
    return [g.op("Squeeze", part, g.ints(1)) for part in g.split(x, [1] * length, axis=1)]


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
        self._ids: list[ir.Value] | None = None
        if candidates is not None:
            if drafter.draft_vocabulary is None:
                ids = g.op("Identity", candidates)  # an input cannot be an output
            else:
                ids = g.op("Gather", g.constant(drafter.draft_vocabulary), candidates, axis=0)
            self._ids = step_values(g, ids, length)
            g.output(DRAFT_IDS, ids, INT64, "B", length, drafter.choices)
        uniforms = g.op("Min", g.input("uniform", FLOAT, "B", length), g.floats(ALMOST_ONE))
        self._uniforms = g.split(uniforms, [1] * length, axis=1)
        temperature = g.input("temperature", FLOAT, "B")
        self._greedy = g.op("Less", temperature, g.floats(GREEDY_TEMPERATURE))
        self._temperature = unsqueeze(g, g.op("Max", temperature, g.floats(GREEDY_TEMPERATURE)), 1)
        self._tokens: list[ir.Value] = []

    def draw(self, step: int, logits: ir.Value) -> ir.Value:
        """Target ids ``[B]`` drawn from ``softmax(logits [B, K] / temperature)``, or the argmax when greedy."""
        g = self._g
        with g.scope("sample"):
            greedy = g.op("ArgMax", logits, axis=-1, keepdims=0)
            probabilities = g.op("Softmax", g.op("Div", logits, self._temperature), axis=-1)
            invert = self._invert_in_bins if self._drafter.choices > BIN else self._invert
            drawn = g.op("Squeeze", invert(probabilities, self._uniforms[step]), g.ints(1))
            token = g.op("Where", self._greedy, greedy, drawn)
            if self._ids is not None:
                token = g.op("GatherND", self._ids[step], unsqueeze(g, token, 1), batch_dims=1)
            elif self._drafter.draft_vocabulary is not None:
                token = g.op("Gather", g.constant(self._drafter.draft_vocabulary), token, axis=0)
        self._tokens.append(token)
        return token

    def output_tokens(self) -> None:
        """Declares the tokens drawn so far as the graph's output."""
        g = self._g
        tokens = g.op("Concat", *[unsqueeze(g, token, 1) for token in self._tokens], axis=1)
        g.output("tokens", tokens, INT64, "B", self._length)

    def _invert(self, probabilities: ir.Value, uniform: ir.Value) -> ir.Value:
        """Index ``[B, 1]`` of the first of a few ``[B, n]`` whose cumulative probability exceeds the uniform."""
        cumulative = self._g.op("CumSum", probabilities, self._g.constant(np.int64(1)))
        return self._count_up_to(cumulative, self._g.op("Mul", self._last(cumulative), uniform))

    def _invert_in_bins(self, probabilities: ir.Value, uniform: ir.Value) -> ir.Value:
        """The same for a whole vocabulary: the bin first, then the index in it."""
        g = self._g
        missing = -self._drafter.choices % BIN
        if missing:
            probabilities = g.op("Pad", probabilities, g.ints(0, 0, 0, missing))
        bins = g.reshape(probabilities, 0, -1, BIN)
        bin_cumulative = g.op("CumSum", g.op("ReduceSum", bins, g.ints(2), keepdims=0), g.constant(np.int64(1)))
        total = self._last(bin_cumulative)
        mass = g.op("Mul", total, uniform)
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

    def _last(self, cumulative: ir.Value) -> ir.Value:
        """The total ``[B, 1]`` of a cumulative sum ``[B, n]``."""
        g = self._g
        return g.op("Slice", cumulative, g.ints(-1), g.ints(np.iinfo(np.int64).max), g.ints(1))

    def _count_up_to(self, cumulative: ir.Value, mass: ir.Value) -> ir.Value:
        """How many entries of ``[B, n]`` are at most ``mass [B, 1]``: the index of the first beyond it, ``[B, 1]``."""
        g = self._g
        reached = g.op("Cast", g.op("LessOrEqual", cumulative, mass), to=INT64)
        return g.op("ReduceSum", reached, g.ints(1), keepdims=1)


class _Repair:
    """The learned part of the head: Markov bias and confidence (SEMANTICS: sequential heads)."""

    def __init__(self, g: GraphBuilder, drafter: Drafter, candidates: ir.Value | None) -> None:
        self._g = g
        self._kind = drafter.head
        self._rank = drafter.markov_rank
        self._hidden_size = drafter.backbone.hidden_size
        self._confidence = drafter.confidence
        self._tensors = drafter.tensors
        self._state: ir.Value | None = None
        self._candidate_rows: list[ir.Value] | None = None
        if candidates is not None and drafter.head is not HeadKind.NONE:
            rows = embed(g, g.reshape(candidates, -1), self._tensors, W2)
            shape = (drafter.draft_length, drafter.choices, drafter.markov_rank)
            self._candidate_rows = step_values(g, g.reshape(rows, -1, *shape), drafter.draft_length)

    def embedding(self, previous: ir.Value) -> ir.Value | None:
        """``W1[previous] [B, r]``; None without a sequential head."""
        if self._kind is HeadKind.NONE:
            return None
        return embed(self._g, previous, self._tensors, "markov_head.markov_w1")

    def apply(self, step: int, logits: ir.Value, embedding: ir.Value | None, hidden: ir.Value) -> ir.Value:
        """Base logits ``[B, K]`` plus the head's bias for one slot."""
        if embedding is None:
            return logits
        g = self._g
        factors = {HeadKind.VANILLA: self._vanilla, HeadKind.GATED: self._gated, HeadKind.RNN: self._rnn}[self._kind]
        chosen = factors(embedding, hidden)
        if self._candidate_rows is None:
            return g.op("Add", logits, linear(g, chosen, self._tensors, W2))
        bias = g.op("MatMul", self._candidate_rows[step], unsqueeze(g, chosen, 2))
        return g.op("Add", logits, g.op("Squeeze", bias, g.ints(2)))

    def confidence(self, hidden: ir.Value, embeddings: Sequence[ir.Value | None]) -> ir.Value:
        """Confidence logits ``[B, γ]``; a slot's depends only on tokens before its own."""
        g, length, width = self._g, len(embeddings), self._hidden_size
        if self._confidence is ConfidenceInput.HIDDEN_AND_MARKOV:
            before = [unsqueeze(g, embedding, 1) for embedding in embeddings if embedding is not None]
            hidden, width = g.op("Concat", hidden, g.op("Concat", *before, axis=1), axis=-1), width + self._rank
        return g.reshape(linear(g, g.reshape(hidden, -1, width), self._tensors, "confidence_head.proj"), -1, length)

    def _vanilla(self, embedding: ir.Value, hidden: ir.Value) -> ir.Value:
        return embedding

    def _gated(self, embedding: ir.Value, hidden: ir.Value) -> ir.Value:
        g = self._g
        gate = linear(g, g.op("Concat", hidden, embedding, axis=-1), self._tensors, "markov_head.gate_proj")
        return g.op("Mul", g.op("Sigmoid", gate), embedding)

    def _rnn(self, embedding: ir.Value, hidden: ir.Value) -> ir.Value:
        g = self._g
        state = self._state or g.op("Sub", embedding, embedding)  # s₀ = 0 at each block
        joint = linear(g, g.op("Concat", state, embedding, hidden, axis=-1), self._tensors, "markov_head.joint_proj")
        gate, candidate, output = g.split(joint, [self._rank] * 3)
        gate = g.op("Sigmoid", gate)
        kept = g.op("Mul", gate, state)
        self._state = g.op("Add", kept, g.op("Mul", g.op("Sub", g.floats(1.0), gate), g.op("Tanh", candidate)))
        return g.op("Tanh", output)
