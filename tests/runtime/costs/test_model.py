"""Costs of steps between those that were measured."""

import numpy as np
import pytest

from dspark.runtime.costs.model import CostModel
from tests.runtime.costs.curves import even_steps
from tests.support.costs import cost_table


def test_attention_computes_every_request_as_if_it_were_the_longest() -> None:
    """A token of a step costs 0.5, and 0.001 for each token of context."""

    def step(requests: int, tokens: int, context: int) -> float:
        return 5 + 0.5 * tokens + 0.001 * tokens * context

    model, context = CostModel(cost_table(step)), 640
    found = model.step_seconds(4, context, np.array([8, 5, 5]), np.array([3, 6, 3]))
    expected = [
        5 + 0.5 * (4 + verified) + 0.001 * 4 * longest * context for verified, longest in ((8, 3), (5, 6), (5, 3))
    ]
    np.testing.assert_allclose(found, np.multiply(expected, 1e-3))


@pytest.mark.parametrize(("requests", "context"), [(1, 128), (2, 128), (3, 128), (5, 640), (8, 1024), (8, 4096)])
def test_linear_costs_are_interpolated_exactly(requests: int, context: int) -> None:
    found = even_steps(cost_table(), requests, context, requests * 5)
    tokens = requests + np.arange(requests * 5 + 1)
    np.testing.assert_allclose(found, 1e-3 * (5 + 0.5 * tokens + requests * context / 512))
    drafting = CostModel(cost_table()).draft_seconds(requests, context)
    assert drafting == pytest.approx(1e-3 * (0.5 + 0.1 * requests + requests * context / 4096))


def test_noise_does_not_make_more_tokens_cheaper() -> None:
    generator = np.random.default_rng(0)
    noisy = cost_table(lambda requests, tokens, context: 10 + 0.1 * tokens + generator.random())
    for requests in range(1, 9):
        assert (np.diff(even_steps(noisy, requests, 2048, 5 * requests)) >= 0).all()
