"""Losses against a computation in float64, and the sampled vocabulary against the whole one."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

BATCH, DRAFTS, SLOTS, HIDDEN, VOCABULARY, RANK, LENGTH = 2, 3, 4, 8, 50, 5, 12


def case(seed: int) -> dict[str, Any]:
    from drafters import Drafted
    from features import Rows
    from losses import compare

    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=random)

    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=random)
    return {
        "drafted": Drafted(draw(BATCH, DRAFTS, SLOTS, HIDDEN), draw(BATCH, DRAFTS, SLOTS, RANK), draw(2, 3, SLOTS)),
        "rows": Rows(ids, torch.ones_like(ids, dtype=torch.bool), draw(BATCH, LENGTH, 2), draw(BATCH, LENGTH, HIDDEN)),
        "anchors": torch.tensor([[1, 4, 6], [0, 2, 9]]),
        "valid": torch.tensor([[[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]], [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]]])
        > 0,
        "lm_head": draw(VOCABULARY, HIDDEN),
        "bias": torch.nn.Linear(RANK, VOCABULARY, bias=False),
        "comparison": compare,
    }


def softmax(logits: Any) -> Any:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def test_against_float64() -> None:
    from losses import WHOLE_VOCABULARY, LossWeights, compute_losses

    values = case(0)
    losses = compute_losses(**values, vocabulary=WHOLE_VOCABULARY, weights=LossWeights(0.3, 0.5, 0.7))
    drafted, table = values["drafted"], values["lm_head"].double().numpy()
    w2 = values["bias"].weight.detach().double().numpy()
    total = weight_sum = 0.0
    for b, a, k in np.ndindex(BATCH, DRAFTS, SLOTS):
        if not values["valid"][b, a, k]:
            continue
        place = int(values["anchors"][b, a]) + k
        p = softmax(values["rows"].final[b, place].double().numpy() @ table.T)
        logits = drafted.hidden[b, a, k].double().numpy() @ table.T + drafted.factors[b, a, k].double().numpy() @ w2.T
        q = softmax(logits)
        rate = np.minimum(p, q).sum()
        np.testing.assert_allclose(float(losses.acceptance[b, a, k]), rate, atol=1e-5)
        assert float(losses.agreement[b, a, k]) == (p.argmax() == q.argmax())
        c = 1 / (1 + np.exp(-float(drafted.confidence[b, a, k])))
        np.testing.assert_allclose(float(losses.confidence_bias[b, a, k]), c - rate, atol=1e-5)
        weight = np.exp(-k / 4)
        surprise = -(rate * np.log(c) + (1 - rate) * np.log(1 - c))
        total += weight * (0.3 * -(p * np.log(q)).sum() + 0.5 * np.abs(p - q).sum() + 0.7 * surprise)
        weight_sum += weight
    np.testing.assert_allclose(losses.total.item(), total / weight_sum, rtol=1e-5)


def test_a_step_without_a_valid_slot_changes_nothing() -> None:
    from losses import WHOLE_VOCABULARY, LossWeights, compute_losses

    values = case(1)
    values["valid"] = torch.zeros_like(values["valid"])
    values["drafted"].hidden.requires_grad_()
    losses = compute_losses(**values, vocabulary=WHOLE_VOCABULARY, weights=LossWeights())
    losses.total.backward()
    assert float(losses.total) == 0
    assert not values["drafted"].hidden.grad.any()


def test_a_sampled_vocabulary_stands_for_the_whole_one() -> None:
    """The softmax's denominator over frequent and sampled tokens is right on average."""
    from losses import LossVocabulary

    counts = torch.arange(VOCABULARY).flip(0)
    vocabulary = LossVocabulary(counts, 10, 8)
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)).double()
    generator = torch.Generator().manual_seed(4)
    sums = []
    for _ in range(4000):
        drawn = vocabulary.draw(generator)
        assert drawn.ids is not None
        assert drawn.log_weights is not None
        assert drawn.ids[:10].tolist() == list(range(10))
        assert drawn.ids[10:].min() >= 10
        sums.append(float((logits[drawn.ids] + drawn.log_weights).exp().sum()))
    error = np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - float(logits.exp().sum())) < 4 * error


def test_a_vocabulary_that_is_all_of_it() -> None:
    from losses import WHOLE_VOCABULARY, LossVocabulary

    counts = torch.ones(VOCABULARY)
    for frequent, sampled in [(0, 5), (40, 10), (60, 0)]:
        assert LossVocabulary(counts, frequent, sampled).draw(torch.Generator()) is WHOLE_VOCABULARY


def test_the_markov_head_starts_as_the_datas_bigrams() -> None:
    """With full rank its bias is the smoothed log ratio itself."""
    from config import DraftConfig, HeadKind
    from heads import SMOOTHING, MarkovHead

    from dspark.exporter.checkpoints.description import DrafterKind

    config = DraftConfig(
        kind=DrafterKind.DSPARK,
        target_layers=4,
        hidden_size=8,
        intermediate_size=8,
        attention_heads=1,
        kv_heads=1,
        head_dim=8,
        norm_epsilon=1e-5,
        rope_theta=1e4,
        context_length=64,
        vocabulary_size=30,
        stop_token_id=0,
        layers=1,
        block_size=4,
        taps=(0,),
        mask_token_id=29,
        head=HeadKind.VANILLA,
        markov_rank=12,
    )
    ids = torch.from_numpy(np.random.default_rng(0).integers(12, size=(20, 40)))
    ids = torch.cat([ids, torch.full((20, 9), 13)], dim=1)  # what fills the rows up
    responses = (ids != 13) & (torch.arange(49) >= 5)
    counts = torch.bincount(ids[responses], minlength=30)
    head = MarkovHead(config)
    head.start_from_bigrams(ids, responses, tokens=30)
    bias = head.markov_w2(head.markov_w1.weight).detach().numpy()
    pairs = np.zeros((12, 12))
    np.add.at(pairs, (ids[:, 4:39].flatten(), ids[:, 5:40].flatten()), 1)
    share = counts[:12].numpy() / counts.sum().numpy()
    expected = np.log((pairs + SMOOTHING * share) / (pairs.sum(axis=1, keepdims=True) + SMOOTHING)) - np.log(share)
    np.testing.assert_allclose(bias[:12, :12], expected, atol=1e-4)
    assert not bias[12:].any()
    assert not bias[:, 12:].any()
