"""The sequential head: repairs a block's base logits left to right, samples, and rates every token.

DSpark paper, sections on semi-autoregressive drafting (the Markov heads) and on the confidence head.
"""

from collections.abc import Sequence

import onnx_ir as ir

from dspark.exporter.checkpoints.description import ConfidenceInput, Drafter, HeadKind
from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.draft_sampler import DraftSampler, step_values
from dspark.exporter.graphs.encodings import Encodings
from dspark.exporter.graphs.facts import drafter_facts
from dspark.exporter.graphs.layers import Model, linear
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.contract import CANDIDATES
from dspark.runtime.bundle.graph_specs import head_spec

__all__ = ["build_head"]

W1, W2 = "markov_head.markov_w1", "markov_head.markov_w2"


def build_head(drafter: Drafter, weights: WeightFile, encodings: Encodings) -> ir.Model:
    """Builds the head's graph, unrolled over the block.

    B requests, γ draft tokens of K choices each.

    | input | type and shape | content |
    |---|---|---|
    | `hidden` | float32 `[B, γ, H′]` | the drafter's normed hidden states |
    | `base_logits` | float32 `[B, γ, K]` | its logits |
    | `candidates` | int64 `[B, γ, K]` | their draft ids; with a top-k only |
    | `anchor_ids` | int64 `[B]` | last token of each request |
    | `uniform` | float32 `[B, γ]` | random numbers from 0 to 1 |
    | `temperature` | float32 `[B]` | 0 takes the likeliest tokens |

    | output | type and shape | content |
    |---|---|---|
    | `draft_ids` | int64 `[B, γ, K]` | target ids of the draft logits; with a top-k only |
    | `tokens` | int64 `[B, γ]` | drawn tokens, target ids |
    | `draft_logits` | float32 `[B, γ, K]` | logits that they were drawn from |
    | `confidence` | float32 `[B, γ]` | logits of their survival; with a confidence head only |

    Args:
        drafter: A DSpark or DFlash drafter; without a sequential head the graph only samples.
        weights: Receives the weights.
        encodings: How they are stored and multiplied with.
    """
    g = GraphBuilder(head_spec(drafter_facts(drafter)), weights)
    length = drafter.draft_length
    base_steps = step_values(g, g.input("base_logits"), length)
    candidates = None if drafter.top_k is None else g.input(CANDIDATES)
    previous = g.unsqueeze(g.input("anchor_ids"), 1)
    sampler = DraftSampler(g, drafter, candidates)
    repair = _Repair(Model(g, drafter.backbone, drafter.tensors, encodings), drafter, g.input("hidden"), candidates)
    embeddings = []
    for step in range(length):
        with g.scope(f"step.{step}"):
            embedding = repair.embedding(previous)
            embeddings.append(embedding)
            previous = sampler.draw(step, repair.apply(step, base_steps[step], embedding))
    sampler.output()
    if drafter.confidence is not ConfidenceInput.NONE:
        g.output("confidence", repair.confidence(embeddings))
    return g.model()


class _Repair:
    """The learned part of the head: Markov bias and confidence (DSpark paper, the same sections).

    A step's values keep the axis of their step: ``[B, 1, …]``.
    """

    def __init__(self, model: Model, drafter: Drafter, hidden: ir.Value, candidates: ir.Value | None) -> None:
        g = self._g = model.g
        self._model = model
        self._drafter = drafter
        self._rank = drafter.markov_rank
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
        return self._look_up(W1, previous)

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
        rated = linear(self._model, g.reshape(seen, -1, width), "confidence_head.proj")
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
        table = f"{name}.weight"
        return self._model.encodings.head_tables.look_up(self._g, ids, table, self._model.tensors[table])

    def _linear(self, name: str, x: ir.Value, inputs: int, outputs: int) -> ir.Value:
        """A linear layer over ``[B, 1, inputs]``."""
        g = self._g
        return g.reshape(linear(self._model, g.reshape(x, -1, inputs), name), -1, 1, outputs)
