"""Draws of draft tokens follow the distribution that they are tested against, in graphs of heads that only sample."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from tests.exporter.graphs.head_graph import SLOTS, Array, Head, draft_ids, probabilities
from tests.support.exported import assert_close

LARGEST_UNIFORM = np.float32(1 - 2**-24)  # of the 24-bit numbers that a float32 generator draws
BATCH = 4000
VOCABULARIES = [1, 2, 100, 255, 256, 257, 512, 700]  # a bin of the inverse CDF holds 256


@pytest.mark.parametrize("size", VOCABULARIES)
def test_draws_follow_the_distribution(size: int, head: Callable[..., Head]) -> None:
    drawn, random = head(size), np.random.default_rng(size)
    logits = np.broadcast_to(random.normal(0, 2, size), (BATCH, SLOTS, size))
    uniform = random.random((BATCH, SLOTS), np.float32)
    outputs = drawn.run(logits, uniform, np.full(BATCH, 0.7))
    counts = np.bincount(draft_ids(drawn, outputs["tokens"]).ravel(), minlength=size)
    expected = probabilities(logits[0, 0], np.array([0.7])) * counts.sum()
    rare = expected < 5  # one class, as the test needs
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    kept = wanted > 0
    assert size == 1 or stats.chisquare(observed[kept], wanted[kept]).pvalue > 1e-4
    assert counts[expected == 0].sum() == 0


@pytest.mark.parametrize("size", VOCABULARIES)
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(size: int, head: Callable[..., Head]) -> None:
    """Every single token, with another distribution in every slot and another temperature in every row."""
    drawn, random = head(size), np.random.default_rng(size + 1)
    logits = random.normal(0, 3, (500, SLOTS, size)).astype(np.float32)
    uniform = random.random((500, SLOTS), np.float32)
    temperature = random.uniform(0.2, 2.0, 500).astype(np.float32)
    outputs = drawn.run(logits, uniform, temperature)
    chosen = draft_ids(drawn, outputs["tokens"])[..., None]
    p = probabilities(outputs["draft_logits"], temperature)
    above = np.take_along_axis(p.cumsum(axis=-1), chosen, -1)[..., 0]
    below = above - np.take_along_axis(p, chosen, -1)[..., 0]
    assert (below <= uniform + 1e-5).all()
    assert (uniform <= above + 1e-5).all()


@pytest.mark.parametrize("size", VOCABULARIES)
def test_greedy_takes_the_likeliest(size: int, head: Callable[..., Head]) -> None:
    drawn, random = head(size), np.random.default_rng(4)
    logits = random.normal(0, 1, (50, SLOTS, size))
    for temperature in (0.0, 9e-6):
        outputs = drawn.run(logits, random.random((50, SLOTS)), np.full(50, temperature))
        assert np.array_equal(draft_ids(drawn, outputs["tokens"]), logits.argmax(axis=-1))
        assert_close(outputs["draft_logits"], logits, 1e-6)


def impossible(size: int, possible: list[int]) -> Array:
    """Logits that leave a few tokens possible; the others' probability is zero in float32."""
    logits = np.full(size, -1e4, np.float32)
    logits[possible] = np.linspace(0, 1, len(possible))
    return logits


EDGES: dict[str, tuple[int, list[int]]] = {
    "first": (100, [0]),
    "last": (100, [99]),
    "middle": (100, [50, 51, 53]),
    "last-of-a-bin": (700, [255, 511]),
    "first-of-a-bin": (700, [256, 512]),
    "inside-bins": (700, [300, 306, 413, 690]),
    "last-of-a-short-bin": (257, [256]),
    "many": (700, [*range(100, 200), *range(400, 500)]),
}


@pytest.mark.parametrize("case", EDGES)
def test_a_token_without_probability_is_never_drawn(case: str, head: Callable[..., Head]) -> None:
    """At the ends of the uniforms, at the borders between bins, and on either side of them."""
    size, possible = EDGES[case]
    drawn = head(size)
    random = np.random.default_rng(6)
    logits = impossible(size, possible)
    borders = probabilities(logits, np.ones(1)).cumsum().astype(np.float32)
    near = [np.nextafter(borders, np.float32(side)) for side in (0, 1)]
    every = np.concatenate([[0, 2**-24, LARGEST_UNIFORM, 1], borders, *near])  # 1: some generators round up to it
    edges = np.unique(np.clip(every, 0, 1))
    spread = np.array([logits + random.normal(0, 1, size) for _ in range(20)])  # rounding falls out differently
    rows = np.repeat(np.concatenate([[logits], spread]), len(edges), axis=0)
    uniform = np.tile(edges, len(spread) + 1)
    outputs = drawn.run(
        np.broadcast_to(rows[:, None], (len(rows), SLOTS, size)),
        np.broadcast_to(uniform[:, None], (len(rows), SLOTS)),
        np.ones(len(rows)),
    )
    assert np.isin(draft_ids(drawn, outputs["tokens"]), possible).all()


def test_the_ends_of_the_uniforms_are_the_ends_of_the_distribution(head: Callable[..., Head]) -> None:
    drawn = head(700)
    logits = np.broadcast_to(impossible(700, [3, 300, 650]), (2, SLOTS, 700))
    uniform = np.repeat([[0.0], [LARGEST_UNIFORM]], SLOTS, axis=1)
    assert drawn.run(logits, uniform, np.ones(2))["tokens"].tolist() == [[3] * SLOTS, [650] * SLOTS]


def test_rows_have_their_own_temperature(head: Callable[..., Head]) -> None:
    """A batch of greedy, cold and hot requests is each of them alone."""
    drawn, random = head(700), np.random.default_rng(7)
    temperature = np.tile([0.0, 1e-6, 0.1, 1.0, 5.0], 20)
    logits = random.normal(0, 2, (100, SLOTS, 700))
    uniform = random.random((100, SLOTS), np.float32)
    together = drawn.run(logits, uniform, temperature)
    alone = [drawn.run(logits[i : i + 1], uniform[i : i + 1], temperature[i : i + 1])["tokens"][0] for i in range(100)]
    assert np.array_equal(together["tokens"], alone)
    greedy = temperature < 1e-5
    assert np.array_equal(together["tokens"][greedy], logits.argmax(axis=-1)[greedy])
    assert not np.array_equal(together["tokens"][~greedy], logits.argmax(axis=-1)[~greedy])


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
def test_extreme_temperatures(temperature: float, head: Callable[..., Head]) -> None:
    drawn, random = head(700), np.random.default_rng(8)
    logits = random.normal(0, 30, (200, SLOTS, 700)).astype(np.float32)
    uniform = random.random((200, SLOTS), np.float32)
    tokens = drawn.run(logits, uniform, np.full(200, temperature))["tokens"]
    p = probabilities(logits, np.full(200, np.float32(temperature)))
    assert (np.take_along_axis(p, tokens[..., None], -1) > 1e-30).all()


def test_values_that_are_not_finite_stay_in_their_row(head: Callable[..., Head]) -> None:
    """The neighbours of a broken request draft on; its own logits show which one it is."""
    drawn, random = head(700), np.random.default_rng(9)
    logits = random.normal(0, 1, (4, SLOTS, 700))
    uniform = random.random((4, SLOTS), np.float32)
    temperature = np.array([1.0, 0.0, 1.0, 1.0])
    expected = drawn.run(logits, uniform, temperature)
    for value in (np.nan, np.inf, -np.inf):
        broken = logits.copy()
        broken[2] = value
        outputs = drawn.run(broken, uniform, temperature)
        assert np.array_equal(np.delete(outputs["tokens"], 2, 0), np.delete(expected["tokens"], 2, 0))
        assert ((outputs["tokens"] >= 0) & (outputs["tokens"] < 700)).all()
        assert not np.isfinite(outputs["draft_logits"][2]).any()
