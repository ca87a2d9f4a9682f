"""Greedy decoding, plain and speculative."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from .drafter import ReferenceDrafter
from .layers import sigmoid
from .target import ReferenceTarget

__all__ = ["Decoding", "decode", "greedy"]


@dataclass
class Decoding:
    """What a request produced.

    Attributes:
        output: New token ids; a stop token is the last one.
        accepted_draft_lengths: Draft tokens accepted in each round; the last may exceed what the length limit let out.
        proposal_lengths: Draft tokens verified in each round.
    """

    output: list[int] = field(default_factory=list)
    accepted_draft_lengths: list[int] = field(default_factory=list)
    proposal_lengths: list[int] = field(default_factory=list)


def greedy(target: ReferenceTarget, prompt: Sequence[int], count: int, stop: Collection[int] = ()) -> list[int]:
    """Plain decoding: up to ``count`` new tokens, a stop token included."""
    output: list[int] = []
    while len(output) < count and not (output and output[-1] in stop):
        logits, _ = target.forward([*prompt, *output], prefill=len(prompt))
        output.append(int(logits[-1].argmax()))
    return output


def decode(
    target: ReferenceTarget,
    drafter: ReferenceDrafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    threshold: float | None = None,
    stop: Collection[int] = (),
) -> Decoding:
    """The draft → verify → accept loop.

    Args:
        threshold: Cut a proposal before the first token whose confidence is below it.
        stop: Token ids that end the request, accepted drafts included.
    """
    result = Decoding()
    tokens = list(prompt)
    logits, states = target.forward(tokens)
    emitted = [int(logits[-1].argmax())]
    while True:
        for token in emitted:
            result.output.append(token)
            if token in stop or len(result.output) == max_new_tokens:
                return result
        tokens += emitted
        start = len(tokens) - 1  # the anchor's position: the target has not run on it yet
        draft = drafter.draft(drafter.taps(states)[:start], tokens)
        proposal = draft.tokens
        if threshold is not None and draft.confidence is not None:
            below = np.flatnonzero(sigmoid(draft.confidence) < threshold)
            proposal = proposal[: below[0]] if len(below) else proposal
        logits, states = target.forward([*tokens, *proposal], prefill=len(prompt))
        choices = [int(token) for token in logits[start:].argmax(axis=-1)]
        matches = [drafted == choice for drafted, choice in zip(proposal, choices, strict=False)]
        accepted = matches.index(False) if False in matches else len(matches)
        ended = [choice in stop for choice in choices[:accepted]]
        if True in ended:  # nothing after a stop token was accepted
            accepted = ended.index(True) + 1
        result.proposal_lengths.append(len(proposal))
        result.accepted_draft_lengths.append(accepted)
        emitted = choices[: accepted + 1]
