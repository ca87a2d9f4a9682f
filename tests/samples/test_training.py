"""The trainer on a tiny target: what it writes, exported, computes what its own PyTorch forward computes."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import write_target
from tests.support.exported import assert_close, export

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

VOCABULARY, BLOCK, MASK = 96, 4, 95
KINDS = ["dspark vanilla", "dspark gated", "dspark rnn", "dflash vanilla", "eagle3 vanilla"]


def write_conversations(path: Path, count: int = 24, length: int = 40, seed: int = 0) -> Path:
    """Texts in which every token follows from the one before, mostly."""
    random = np.random.default_rng(seed)
    ids = np.zeros((count, length), np.uint16)
    mask = np.zeros((count, length), np.uint8)
    for row in range(count):
        text = [int(random.integers(MASK))]
        while len(text) < length:
            text.append((text[-1] * 5 + 1) % MASK if random.random() < 0.9 else int(random.integers(MASK)))
        ids[row], mask[row, 8 : length - row % 5] = text, 1
    np.savez(path, ids=ids, response_mask=mask, temperature=np.ones(count, np.float32))
    return path


def train(folder: Path, kind: str, head: str, **changes: Any) -> tuple[Path, Path]:
    """Trains for some seconds; returns target and drafter."""
    import train as trainer

    target = folder / "target"
    if not target.exists():
        folder.mkdir(exist_ok=True)
        write_target(target)
    options: dict[str, Any] = {
        "kind": trainer.DrafterKind(kind),
        "head": trainer.HeadKind(head),
        "minutes": 0.03,
        "block_size": BLOCK,
        "layers": None,
        "taps": "0,1,2",
        "mask_token": None,
        "markov_rank": 8,
        "learning_rate": 3e-3,
        "cross_entropy_first": 0.4,
        "loss_vocabulary": 0,
        "loss_samples": 0,
        "rows": 4,
        "accumulate": 1,
        "anchors": 6,
        "held_out": 4,
        "evaluate_every": 1.0,
        "start_from": None,
        "confidence_data": None,
        "features": folder / "features",
        "precision": trainer.Precision("fp32"),
        "threads": 1,
        "compiled": False,
        "seed": 0,
    }
    output = folder / f"{kind}-{head}"
    data = [changes.pop("data", None) or write_conversations(folder / "data.npz")]
    trainer.main(target=target, data=data, output=output, **{**options, **changes})
    return target, output


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_drafter_is_the_trained_one(kind: str, tmp_path: Path) -> None:
    from drafters import BlockDrafter, make_drafter
    from features import Rows
    from layers import turns
    from safetensors.torch import load_file

    from dspark.exporter.checkpoints import read_drafter, read_target
    from dspark.exporter.exported_graphs import ExportedGraphs
    from dspark.exporter.torch_reference import load_target_model
    from dspark.runtime import Bundle
    from dspark.runtime.bundle.contract import FEATURE, context_names

    name, head = kind.split()
    target, output = train(tmp_path, name, head)
    graphs = ExportedGraphs(Bundle.open(export(target, output, tmp_path / "bundle")))
    description = read_target(target)
    assert read_drafter(output, description).kind == name

    model = load_target_model(target, description, torch.float32)
    drafter = make_drafter(_config(output), model.get_input_embeddings().weight)
    weights = load_file(output / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    drafter.load_state_dict(weights)

    text = np.random.default_rng(1).integers(VOCABULARY, size=17)
    context, anchor = graphs.target(text[:-1]), int(text[-1])
    if name == "eagle3":
        drafted = graphs.eagle3(context, text[1:])
    else:
        block = graphs.block({key: value for key, value in context.items() if key != "logits"}, anchor)
        drafted = graphs.head(block, anchor)
    ids = torch.tensor([*text, *drafted["tokens"][0]])[None]
    states = model(ids, output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap + 1] for tap in (0, 1, 2)], dim=-1)
    rows = Rows(ids, torch.ones_like(ids, dtype=torch.bool), taps, states[-1])
    with torch.no_grad():
        own = drafter(rows, torch.tensor([[len(text) - 1]]))
        logits = own.hidden @ model.get_output_embeddings().weight.T
        if isinstance(drafter, BlockDrafter):
            assert_close(block["hidden"], own.hidden[0].numpy(), 2e-5)
            assert_close(block["base_logits"], logits[0].numpy(), 2e-5)
            feature = drafter.context(taps)[:, : len(text) - 1]
            positions = torch.arange(len(text) - 1)
            for index, layer in enumerate(drafter.layers):
                attention = layer.self_attn
                keys = attention.keys(feature, turns(positions, drafter.config, feature.dtype)).transpose(1, 2)
                values = attention.values(feature).transpose(1, 2)
                for part, expected in zip(context_names(index), (keys, values), strict=True):
                    assert_close(context[part], expected.numpy(), 2e-5)
        else:
            assert_close(context[FEATURE], drafter.fc(taps)[0, : len(text) - 1].numpy(), 2e-5)
        if own.factors is not None:
            logits = logits + drafter.markov_head.markov_w2(own.factors)
    assert_close(drafted["draft_logits"], logits[0].numpy(), 2e-5)
    assert drafted["tokens"][0].tolist() == logits[0, 0].argmax(dim=-1).tolist()
    assert ("confidence" in drafted) == (own.confidence is not None) == (name == "dspark")
    if own.confidence is not None:
        assert_close(drafted["confidence"], own.confidence[0].numpy(), 2e-5)


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
def test_training_learns(kind: str, tmp_path: Path) -> None:
    """The data is nothing like the tiny target's own text, but its distribution is there to be learnt."""
    _, output = train(tmp_path, kind, "vanilla", minutes=0.25)
    first, *_, last = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert first["step"] == 0
    assert last["acceptance_length"] > first["acceptance_length"] + 0.3


def test_a_run_that_was_broken_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer

    _, output = train(tmp_path, "dspark", "rnn", minutes=0.02)
    saved = torch.load(output / "state.pt", weights_only=True)
    seen: list[dict[str, Any]] = []
    step = trainer.Trainer._train

    def watched(self: trainer.Trainer, passes: list[list[int]], progress: float) -> float:
        if not seen:
            state = {name: value.clone() for name, value in self._drafter.state_dict().items()}
            optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in self._optimizers]
            seen.append({"drafter": state, "optimizers": optimizers, "step": self._step, "progress": progress})
        return step(self, passes, progress)

    monkeypatch.setattr(trainer.Trainer, "_train", watched)
    train(tmp_path, "dspark", "rnn", minutes=0.05)
    assert seen[0]["step"] == saved["step"] > 0
    assert seen[0]["progress"] == pytest.approx(saved["seconds"] / 3)
    torch.testing.assert_close(seen[0]["drafter"], saved["drafter"], rtol=0, atol=0)
    for mine, stored in zip(seen[0]["optimizers"], saved["optimizers"], strict=True):
        torch.testing.assert_close(mine["state"], stored["state"], rtol=0, atol=0)
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == sorted({entry["step"] for entry in log})
    assert log[-1]["minutes"] >= 0.05

    finished = (output / "state.pt").read_bytes()
    train(tmp_path, "dspark", "rnn", minutes=0.05)
    assert (output / "state.pt").read_bytes() == finished
    assert len((output / "log.jsonl").read_text().splitlines()) == len(log)


def test_a_run_of_another_drafter_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "dspark", "vanilla", minutes=0.01)
    with pytest.raises(ValueError, match=r"target_layer_ids is \[0, 1, 2\], not \[0, 1\]; choose another --output"):
        train(tmp_path, "dspark", "vanilla", taps="0,1")


def test_training_on_from_a_checkpoint(tmp_path: Path) -> None:
    _, first = train(tmp_path, "dspark", "vanilla", minutes=0.2)
    target = tmp_path / "target"
    again = tmp_path / "again"
    again.mkdir()
    target.rename(again / "target")
    _, second = train(again, "dspark", "vanilla", start_from=first, mask_token=None, block_size=3)
    log = [json.loads((folder / "log.jsonl").read_text().splitlines()[0]) for folder in (first, second)]
    assert log[1]["acceptance"][0] > log[0]["acceptance"][0] + 0.1
    with pytest.raises(ValueError, match="is another drafter: its markov_head_type is vanilla, not gated"):
        train(again, "dspark", "gated", start_from=first)


def test_confidences_are_fitted_to_other_conversations(tmp_path: Path) -> None:
    """The head alone changes, and on those conversations it is right on average."""
    from safetensors.torch import load_file

    _, output = train(tmp_path, "dspark", "vanilla", minutes=0.05)
    before = load_file(output / "model.safetensors")
    other = write_conversations(tmp_path / "other.npz", count=16, seed=1)
    _, again = train(tmp_path, "dspark", "vanilla", minutes=0.05, confidence_data=[other])
    assert again == output
    after = load_file(output / "model.safetensors")
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {"confidence_head.proj.weight", "confidence_head.proj.bias"}

    _, unfitted = train(tmp_path / "unfitted", "dspark", "vanilla", data=other, start_from=output, minutes=0.01)
    log = json.loads((unfitted / "log.jsonl").read_text().splitlines()[0])
    assert abs(log["confidence_bias"]) < 0.03
    with pytest.raises(ValueError, match="a dflash drafter has no confidence head to fit"):
        train(tmp_path, "dflash", "vanilla", minutes=0.01, confidence_data=[other])


def test_added_layers_change_nothing_before_they_learn(tmp_path: Path) -> None:
    _, first = train(tmp_path, "dspark", "vanilla", minutes=0.1)
    (first / "log.jsonl").rename(first / "log_before.jsonl")
    deeper = tmp_path / "deeper"
    deeper.mkdir()
    (tmp_path / "target").rename(deeper / "target")
    _, second = train(deeper, "dspark", "vanilla", start_from=first, layers=3)
    before = json.loads((first / "log_before.jsonl").read_text().splitlines()[-1])
    start, *_, end = map(json.loads, (second / "log.jsonl").read_text().splitlines())
    assert start["acceptance"] == pytest.approx(before["acceptance"], abs=0.01)  # checkpoints are in bfloat16
    assert end["acceptance"] != start["acceptance"]
    with pytest.raises(ValueError, match=r"layers\.2\..* is not in both the file and the drafter"):
        train(deeper, "dspark", "vanilla", start_from=second, layers=2, minutes=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": "1,x"}, "taps are '1,x'; they must be numbers"),
        ({"taps": "0,3"}, "they must increase and lie between -1 and 2"),
        ({"held_out": 24}, "held_out is 24; of 24 conversations"),
        ({"accumulate": 0}, "accumulate is 0; it must be above 0"),
        ({"mask_token": 96}, "mask_token_id is 96; the vocabulary has 96"),
        ({"loss_vocabulary": 10}, "loss_samples is 0"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        train(tmp_path, "dspark", "vanilla", **changes)
    assert {path.parent.name for path in tmp_path.rglob("*.safetensors*")} == {"target"}


def _config(folder: Path) -> Any:
    """The configuration that a checkpoint was made from."""
    from config import DraftConfig, HeadKind

    from dspark.exporter.checkpoints.description import DrafterKind

    values = json.loads((folder / "config.json").read_text())
    eagle3 = values["architectures"] == ["Qwen3Eagle3Model"]
    rank = values.get("markov_rank", 0)
    return DraftConfig(
        kind=DrafterKind.EAGLE3 if eagle3 else DrafterKind.DSPARK if rank else DrafterKind.DFLASH,
        target_layers=values["num_target_layers"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        attention_heads=values["num_attention_heads"],
        kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        norm_epsilon=values["rms_norm_eps"],
        rope_theta=values["rope_parameters"]["rope_theta"],
        context_length=values["max_position_embeddings"],
        vocabulary_size=values["vocab_size"],
        stop_token_id=values["eos_token_id"],
        layers=values["num_hidden_layers"],
        block_size=values.get("block_size", values.get("ttt_length")),
        taps=tuple(values["target_layer_ids"]),
        mask_token_id=values.get("mask_token_id", 0),
        head=HeadKind(values.get("markov_head_type", "vanilla")),
        markov_rank=rank,
    )
