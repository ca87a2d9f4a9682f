"""The target's scores of tokens, as far as somebody looks at them."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dspark.providers.session import Buffer
from dspark.runtime.decoding.finite import has_finite_sum, require_finite

__all__ = ["Scores"]


@dataclass(frozen=True)
class Scores:
    """Logits after some tokens, and what of them is enough for greedy requests.

    Logits that lie on a device are copied to the host when a request looks at them, and not before.

    Attributes:
        logits: float32 ``[K, V]``, on the host or a device.
        choices: The likeliest token of each row, int64 ``[K]``; None if the graph has not looked for it.
        sums: Sum of each row, float32 ``[K]``; None with ``choices``.
    """

    logits: Buffer
    choices: NDArray[np.int64] | None = None
    sums: NDArray[np.float32] | None = None

    def part(self, first: int, end: int) -> "Scores":
        """Those of the rows ``first`` to ``end`` − 1."""
        if self.choices is None or self.sums is None:
            return Scores(self.logits[first:end])
        return Scores(self.logits[first:end], self.choices[first:end], self.sums[first:end])

    @cached_property
    def rows(self) -> NDArray[np.float32]:
        """The logits ``[K, V]`` on the host."""
        on_host: NDArray[np.float32] = self.logits if isinstance(self.logits, np.ndarray) else self.logits.read()
        return on_host

    def row(self, index: int) -> NDArray[np.float32]:
        """The logits ``[V]`` of a row, on the host.

        Raises:
            NumericalError: One is not finite.
        """
        row: NDArray[np.float32] = self.rows[index]
        require_finite(row, f"the target's logits of slot {index}")
        return row

    def likeliest(self, index: int) -> int:
        """The token of a row's largest logit; of several the first.

        Raises:
            NumericalError: A logit of the row is not finite.
        """
        if self.choices is None or not self.finite(index):  # finite logits may have a sum that is not
            return int(self.row(index).argmax())
        return int(self.choices[index])

    def finite(self, index: int) -> bool:
        """Whether a row's logits have a finite sum: only finite ones can."""
        return has_finite_sum(self.rows[index]) if self.sums is None else math.isfinite(self.sums[index])
