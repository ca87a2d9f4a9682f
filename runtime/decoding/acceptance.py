"""The accept rule: which draft tokens stand, and the token that the target adds itself."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dspark.runtime.decoding.distribution import Distribution, proposed, shaped
from dspark.runtime.decoding.penalties import Penalties
from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.decoding.scores import Scores

__all__ = ["Sampler"]

# Below this mass max(p - q, 0) is rounding noise: p and q are the same distribution.
_SMALLEST_RESIDUAL = 1e-8


class Sampler:
    """Decides the tokens of one request; its output follows the target's distribution whatever the drafter proposes.

    Speculative sampling of Leviathan et al. (arXiv:2211.17192) and Chen et al. (arXiv:2302.01318). Greedy decoding is
    the case where p has all its mass on one token.

    Three independent random streams feed the draft, the accept tests and the target's own tokens. How many
    numbers a call takes depends on its draft tokens alone, so a request's draws do not depend on its neighbours.

    Args:
        params: The request's options.
        prompt_ids: The prompt's token ids, for the repetition penalty.
        vocabulary_size: V.
        stop_token_ids: Tokens after which nothing is emitted.

    Attributes:
        params: As given.

    Raises:
        RequestError: A biased token id is outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | npt.NDArray[np.int64],
        vocabulary_size: int,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.params = params
        self._penalties = Penalties(params, prompt_ids, vocabulary_size)
        self._takes_likeliest = params.greedy and not self._penalties.active
        self._stop_token_ids = stop_token_ids
        streams = np.random.SeedSequence(params.seed).spawn(3)
        self._draft_stream, self._accept_stream, self._recovery_stream = map(np.random.default_rng, streams)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a draw."""
        return self.params.greedy

    @property
    def draft_temperature(self) -> float:
        """The temperature to draw draft tokens with; 0 asks for the likeliest."""
        return 0.0 if self.greedy else self.params.temperature

    def draft_uniforms(self, count: int) -> npt.NDArray[np.float32]:
        """Draws ``[count]`` uniforms in [0, 1) for the draft tokens of one block."""
        return self._draft_stream.random(count, dtype=np.float32)

    def next_token(self, scores: Scores) -> int:
        """Decides one token without a draft.

        Args:
            scores: The target's, one row.

        Raises:
            NumericalError: A logit is not finite.
        """
        return self.accept(scores, np.empty(0, np.int64), None, None)[1][0]

    def accept(
        self,
        scores: Scores,
        draft_tokens: npt.NDArray[np.int64],
        draft_logits: npt.NDArray[np.float32] | None,
        draft_ids: npt.NDArray[np.int64] | None,
    ) -> tuple[int, list[int]]:
        """Decides one round of ℓ ≥ 0 draft tokens.

        Args:
            scores: The target's after the anchor and after each draft token, ℓ + 1 rows.
            draft_tokens: ``[ℓ]`` target token ids.
            draft_logits: ``[ℓ, K]`` what the tokens were drawn from at ``draft_temperature``; None when they were not
                drawn but chosen (each is certain to have been proposed).
            draft_ids: ``[ℓ, K]`` target ids of the draft logits; None when logit i is of token i.

        Returns:
            How many draft tokens were accepted, and the tokens emitted: these and one of the target's own. An accepted
            stop token ends both: nothing follows it.

        Raises:
            NumericalError: A row that was needed holds a NaN or an infinity.
        """
        if self._takes_likeliest:
            return self._accept_likeliest(scores, draft_tokens)
        uniforms = self._accept_stream.random(len(draft_tokens)).tolist()
        recovery = self._recovery_stream.random()
        emitted: list[int] = []
        for slot, token in enumerate(draft_tokens.tolist()):
            p = self._target(scores, slot)
            if self.greedy or draft_logits is None:
                q = Distribution.point(token)
            else:
                name = f"the drafter's logits of slot {slot}"
                ids = None if draft_ids is None else draft_ids[slot]
                q = proposed(draft_logits[slot], self.draft_temperature, ids, name)
            if uniforms[slot] * q.probability(token) >= p.probability(token):
                return slot, [*emitted, self._emit(_residual(p, q, scores.rows.shape[1]).draw(recovery))]
            emitted.append(self._emit(token))
            if token in self._stop_token_ids:
                return slot + 1, emitted
        bonus = self._target(scores, len(emitted)).draw(recovery)
        return len(emitted), [*emitted, self._emit(bonus)]

    def _accept_likeliest(self, scores: Scores, draft_tokens: npt.NDArray[np.int64]) -> tuple[int, list[int]]:
        """The rule where p has all its mass on the likeliest token of every row: no distribution has to be made."""
        emitted: list[int] = []
        for slot, token in enumerate(draft_tokens.tolist()):
            emitted.append(scores.likeliest(slot))
            if emitted[-1] != token:
                return slot, emitted
            if token in self._stop_token_ids:
                return slot + 1, emitted
        return len(emitted), [*emitted, scores.likeliest(len(emitted))]

    def _target(self, scores: Scores, slot: int) -> Distribution:
        return shaped(self._penalties.apply(scores.row(slot)), self.params)

    def _emit(self, token: int) -> int:
        # Counted at once: the next row's penalties see the tokens before it, as in decoding one at a time.
        self._penalties.record(token)
        return token


def _residual(p: Distribution, q: Distribution, vocabulary_size: int) -> Distribution:
    """max(p − q, 0), from which the token after a rejection is drawn."""
    if len(p.weights) == 1:  # greedy: only its own token can follow
        return p
    residual = Distribution(np.maximum(p.dense(vocabulary_size) - q.dense(vocabulary_size), 0))
    return residual if residual.total > _SMALLEST_RESIDUAL else p
