"""The target's features are computed once and are the target's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import write_target

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_features_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import features
    from conversations import Conversations

    from dspark.exporter.checkpoints import read_target
    from dspark.exporter.torch_reference import load_target_model

    monkeypatch.setattr(features, "SHARD", 3)
    target = write_target(tmp_path / "target")
    model = load_target_model(target, read_target(target), torch.float32)
    random = np.random.default_rng(0)
    ids = torch.from_numpy(random.integers(96, size=(8, 30)))
    lengths = torch.tensor([30, 12, 21, 9, 30, 17, 25, 30])
    responses = (torch.arange(30) >= 4) & (torch.arange(30) < lengths[:, None])
    conversations = Conversations(ids, responses, lengths)

    def store(count: int, target: Any) -> features.FeatureStore:
        return features.FeatureStore(tmp_path / "features", conversations.take(slice(0, count)), [0, 2], target, "tiny")

    store(6, model)
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "features").iterdir()}
    assert len(written) == 2
    grown = store(8, model)
    assert {path.name for path in (tmp_path / "features").iterdir()} > set(written)
    assert all((tmp_path / "features" / name).stat().st_mtime_ns == time for name, time in written.items())

    rows = grown.rows([7, 1, 3])
    for row, index in enumerate([7, 1, 3]):
        length = int(lengths[index])
        states = model(ids[index : index + 1, :length], output_hidden_states=True).hidden_states
        expected = torch.cat([states[1], states[3]], dim=-1)[0]
        torch.testing.assert_close(rows.taps[row, :length].float(), expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(rows.final[row, :length].float(), states[-1][0], rtol=1e-2, atol=1e-2)
        assert not rows.taps[row, length:].any()
        assert rows.ids[row, :length].tolist() == ids[index, :length].tolist()
    store(8, None)  # nothing is missing: the target is not asked
