"""The head's graph by itself: greedy chains, and draws that follow the distribution they are tested against."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.checkpoints import write_deepspec, write_speculators, write_target
from tests.exported import assert_close, export
from tests.graph_host import open_graph
from tests.reference import ReferenceDrafter, ReferenceTarget

Array = NDArray[Any]

LARGEST_UNIFORM = np.float32(1 - 2**-24)  # of the 24-bit numbers that a float32 generator draws
SLOTS = 3
HIDDEN = 8
BATCH = 4000
VOCABULARIES = [1, 2, 100, 255, 256, 257, 512, 700]  # a bin of the inverse CDF holds 256


class Head:
    """A head's graph and what its vocabulary is."""

    def __init__(self, bundle: Path) -> None:
        self.session = open_graph(bundle, "head")
        shapes = {each.name: each.shape for each in self.session.get_inputs()}
        self.vocabulary = shapes["base_logits"][2]
        table = bundle / "draft_vocabulary.npy"
        self.target_ids = np.load(table) if table.is_file() else np.arange(self.vocabulary)

    def run(self, logits: Array, uniform: Array, temperature: Array, **feeds: Array) -> dict[str, Array]:
        """The outputs for base logits ``[B, γ, V']`` and hidden states of zero."""
        batch = len(logits)
        inputs = {
            "hidden": np.zeros((batch, SLOTS, HIDDEN)),
            "base_logits": logits,
            "uniform": uniform,
            "temperature": temperature,
        } | feeds
        inputs = {name: np.ascontiguousarray(array, np.float32) for name, array in inputs.items()}
        inputs["anchor_ids"] = np.asarray(feeds.get("anchor_ids", np.zeros(batch)), np.int64)
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, inputs), strict=True))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Head]:
    """Exports a head for a vocabulary size; with a ``target_size`` the vocabulary is a reduced one."""

    @cache
    def head(size: int, kind: str = "none", target_size: int | None = None) -> Head:
        folder = tmp_path_factory.mktemp("head")
        layers = {"num_hidden_layers": 2, "head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
        whole = {"vocab_size": target_size or max(size, 100), "hidden_size": HIDDEN, **layers}
        target = write_target(folder / "target", eos_token_id=0, **whole)
        options = {"block_size": SLOTS, "layers": 1, "taps": [0], "rank": 4, "head": kind, "confidence": "none"}
        if target_size is None and size >= 100:
            drafter = write_deepspec(folder / "drafter", target, **options)
        else:
            drafter = write_speculators(folder / "drafter", target, draft_vocab=size, **options)
        return Head(export(target, drafter, folder / "bundle"))

    return head


def probabilities(logits: Array, temperature: Array) -> Array:
    """``softmax(logits / temperature)`` of ``[B, …, V']`` with a temperature a row, in float64."""
    scaled = logits.astype(np.float64) / temperature.reshape(-1, *[1] * (logits.ndim - 1))
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def draft_ids(head: Head, tokens: Array) -> Array:
    """Draft ids of target ids, which must be in the draft vocabulary."""
    assert np.isin(tokens, head.target_ids).all()
    return np.searchsorted(head.target_ids, tokens)


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


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_token_is_drawn_from_the_logits_that_are_returned(
    kind: str, reduced: bool, head: Callable[..., Head]
) -> None:
    """A sequential head's logits depend on the tokens drawn before; the draw and the acceptance test read the same."""
    drawn, random = head(300, kind, 400 if reduced else None), np.random.default_rng(3)
    feeds = {"anchor_ids": random.integers(0, 300, 500), "hidden": random.normal(0, 1, (500, SLOTS, HIDDEN))}
    logits = random.normal(0, 1, (500, SLOTS, 300))
    uniform = random.random((500, SLOTS), np.float32)
    temperature = np.full(500, 0.8)
    outputs = drawn.run(logits, uniform, temperature, **feeds)
    chosen = draft_ids(drawn, outputs["tokens"])[..., None]
    cumulative = probabilities(outputs["draft_logits"], temperature).cumsum(axis=-1)
    above = np.take_along_axis(cumulative, chosen, -1)[..., 0]
    assert (uniform <= above + 1e-5).all()
    assert (above - uniform <= 1 + 1e-5).all()
    others = drawn.run(logits, uniform[::-1], temperature, **feeds)
    same = (others["tokens"][:, 0] == outputs["tokens"][:, 0]).nonzero()[0]
    differ = (others["tokens"][:, 0] != outputs["tokens"][:, 0]).nonzero()[0]
    assert_close(others["draft_logits"][same, 1], outputs["draft_logits"][same, 1], 1e-6)
    assert not np.isclose(others["draft_logits"][differ, 1], outputs["draft_logits"][differ, 1]).all(axis=-1).any()


@pytest.mark.parametrize("size", VOCABULARIES)
def test_greedy_takes_the_likeliest(size: int, head: Callable[..., Head]) -> None:
    drawn, random = head(size), np.random.default_rng(4)
    logits = random.normal(0, 1, (50, SLOTS, size))
    for temperature in (0.0, 9e-6):
        outputs = drawn.run(logits, random.random((50, SLOTS)), np.full(50, temperature))
        assert np.array_equal(draft_ids(drawn, outputs["tokens"]), logits.argmax(axis=-1))
        assert_close(outputs["draft_logits"], logits, 1e-6)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_greedy_chain_is_the_reference(kind: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", vocab_size=300)
    drafter = write_deepspec(tmp_path / "drafter", target, head=kind, block_size=SLOTS, confidence="markov")
    reference = ReferenceDrafter(drafter, ReferenceTarget(target))
    graph = Head(export(target, drafter, tmp_path / "bundle"))
    text = np.random.default_rng(5).integers(0, 290, 20).tolist()
    draft = reference.draft(reference.taps(ReferenceTarget(target).forward(text)[1])[:-1], text)
    feeds = {"hidden": draft.hidden[None], "anchor_ids": np.array(text[-1:])}
    outputs = graph.run(draft.base_logits[None], np.zeros((1, SLOTS)), np.zeros(1), **feeds)
    assert outputs["tokens"][0].tolist() == draft.tokens
    assert_close(outputs["draft_logits"][0], draft.logits)
    assert draft.confidence is not None
    assert_close(outputs["confidence"][0], draft.confidence)


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
    """The neighbours of a broken request draft on; whoever reads the logits sees which one it is."""
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
