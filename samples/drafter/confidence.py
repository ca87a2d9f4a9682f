"""Fits a confidence head once more, to conversations that its drafter was not trained on.

A drafter does better on what it has seen, and the head learns how well it does there: it comes out too sure.
"""

import torch
from heads import ConfidenceHead
from torch import Tensor
from torch.nn import functional as F

__all__ = ["fit_confidence"]

STEPS = 100
RIDGE = 1e-4
"""Holds weights back that the data says nothing about."""


def fit_confidence(head: ConfidenceHead, inputs: Tensor, acceptance: Tensor) -> None:
    """Minimises the binary cross-entropy of confidences and acceptance rates.

    Args:
        head: Begins as it is.
        inputs: What it reads, float32 ``[n, H + r]``.
        acceptance: The probability that each token is accepted, float32 ``[n]``.
    """
    start = head.proj.weight.detach().clone()
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        surprise = F.binary_cross_entropy_with_logits(head.proj(inputs).squeeze(-1), acceptance)
        total = surprise + RIDGE * (head.proj.weight - start).square().sum()
        total.backward()
        return float(total.detach())

    optimizer.step(loss)
