"""Cost tables in the bundle: written, found again, refused where they do not belong."""

import json
from pathlib import Path

import pytest

from dspark.providers import OnnxRuntimeProvider, find_provider
from dspark.runtime import Bundle, BundleError, DSparkInference
from dspark.runtime.costs.store import cost_file, cost_key, read_costs, write_costs
from dspark.runtime.costs.table import CostKey
from tests.runtime.costs.curves import drafts
from tests.support.costs import cost_table, key_of

CPU = find_provider("cpu")


def test_a_table_comes_back_as_it_was(copied: Path) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    assert read_costs(bundle, key) is None
    table = cost_table(key=key)
    assert write_costs(bundle, table) == cost_file(bundle, key)
    assert read_costs(bundle, key) == table
    stored = json.loads(cost_file(bundle, key).read_text())
    assert stored["max_batch_tokens"] == 48
    curve = next(curve for curve in stored["curves"] if (curve["requests"], curve["context_length"]) == (2, 128))
    assert curve["sample_batch_tokens"] == [2, 4, 6, 8, 10, 12]
    assert curve["sample_steps_per_sec"][1] == pytest.approx(1e3 / (5 + 2 + 0.5))


def test_the_key_says_where_it_was_measured(copied: Path) -> None:
    key = key_of(copied)
    assert "cores" in key.device
    assert key.threads == 1
    assert set(key.versions) == {"dspark-onnx", "onnxruntime"}
    assert {"target.onnx", "drafter.onnx", "head.onnx", "weights.bin"} <= set(key.files)
    assert key.file_name == cost_key(Bundle.open(copied), CPU, 1).file_name
    assert key.file_name != cost_key(Bundle.open(copied), CPU, 2).file_name


def test_a_table_of_another_accelerator_is_not_used(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, host, told = Bundle.open(copied), key_of(copied).device, list[str]()

    def key_on(device: str) -> CostKey:
        monkeypatch.setattr(OnnxRuntimeProvider, "device_name", lambda *_: device)
        return key_of(copied)

    small, large = key_on("Abacus 10"), key_on("Abacus 12")
    assert (small.device, large.device) == (f"Abacus 10, {host}", f"Abacus 12, {host}")
    file = write_costs(bundle, cost_table(key=small))
    assert read_costs(bundle, large) is None
    DSparkInference.load(copied, threads=1, batch_size=1, notify=told.append)
    assert told == [f"Measuring briefly what steps cost on this device: {cost_file(bundle, large, brief=True)}"]
    file.rename(cost_file(bundle, large))
    with pytest.raises(BundleError, match=f"was measured with device {small.device}; here it is {large.device}"):
        read_costs(bundle, large)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "Abacus, 1 cores"}, "was measured with device Abacus, 1 cores; here it is "),
        ({"provider": "cuda"}, "was measured with provider cuda; here it is cpu"),
        ({"threads": 3}, "was measured with threads 3; here it is 1"),
        ({"precision": {"target": "int8"}}, "was measured with precision drafter None; here it is fp32"),
        ({"files": {}}, "was measured with files drafter.onnx None; here it is "),
        ({"versions": {"onnxruntime": "1.2", "dspark-onnx": "0.1.0"}}, "versions onnxruntime 1.2; here it is "),
    ],
)
def test_a_table_from_elsewhere_is_refused(change: dict[str, object], message: str, copied: Path) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    write_costs(bundle, cost_table(key=key))
    foreign = cost_table(key=key.model_copy(update=change))
    cost_file(bundle, key).write_text(foreign.model_dump_json())
    with pytest.raises(BundleError) as raised:
        read_costs(bundle, key)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{cost_file(bundle, key)}: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "Invalid JSON"),
        ({"schema_version": 3}, "schema version 3; this runtime reads version 2"),
        ({"curves": []}, "curves: Tuple should have at least 1 item"),
        ({"draft_curves": []}, "draft_curves: Tuple should have at least 1 item"),
        (drafts([1]), "sample_drafts_per_sec has 4 values and sample_requests 1; they must be equally long"),
        (drafts([2, 4, 6, 8]), r"sample_requests is \[2, 4, 6, 8\]; it must rise, from 1 on"),
        (drafts([1, 4, 2, 8]), r"sample_requests is \[1, 4, 2, 8\]; it must rise, from 1 on"),
        (drafts([1, 2, 2, 8]), r"sample_requests is \[1, 2, 2, 8\]; it must rise, from 1 on"),
        (
            drafts([1, 2, 4, 8], [1, 1e-320, 1, 1]),
            "per_sec.1: Input should be greater than or equal to 0.000001, not 1e-320",
        ),
        (
            {"draft_curves": 2 * drafts([1, 2, 4, 8])["draft_curves"]},
            r"context_length of draft_curves is \[128, 128\]; it must rise, from 128 on",
        ),
        ({"max_batch_tokens": 47}, "max_batch_tokens is 47; the largest of sample_batch_tokens is 48"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
    ],
)
def test_a_damaged_table_is_refused(change: str | dict[str, object], message: str, copied: Path) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    file = write_costs(bundle, cost_table(key=key))
    content = json.loads(file.read_text())
    file.write_text(change if isinstance(change, str) else json.dumps(content | change))
    with pytest.raises(BundleError, match=message):
        read_costs(bundle, key)


def test_a_table_with_a_key_twice_is_refused(copied: Path) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    file = write_costs(bundle, cost_table(key=key))
    file.write_text(file.read_text().replace('"brief"', '"brief": true, "brief"'))
    with pytest.raises(BundleError) as raised:
        read_costs(bundle, key)
    assert str(raised.value) == f"{file}: key 'brief' stands there twice"


@pytest.mark.parametrize(
    ("kept", "changes", "message"),
    [
        ([0, 2, 3, 4], {}, "curves has none of 1 request at the smallest context_length, 128"),
        ([2, 3, 4], {}, "curves has none of 1 request at the smallest context_length, 128"),
        ([0, 1, 2, 2, 3, 4], {}, "curves has requests 2 at context_length 128 twice; it must be there once"),
        (
            [0, 1, 2, 3, 4],
            {3: {"context_length": 256}},
            "curves has requests 4 at context_length 256; beyond the smallest, 128, there must be only 1 request",
        ),
        (
            [0, 1, 2, 3, 4],
            {0: {"sample_batch_tokens": [1, 2, 3, 4, 5, 7]}},
            "curves has requests 1 at context_length 1024 with sample_batch_tokens [1, 2, 3, 4, 5, 7]; "
            "all of 1 request must have [1, 2, 3, 4, 5, 6]",
        ),
        (
            [0, 1, 2, 3, 4],
            {2: {"sample_batch_tokens": [2, 4, 6, 8, 10, 10**30]}},
            "curves.2.sample_batch_tokens.5: Input should be less than or equal to 1048576, not 1000",
        ),
    ],
)
def test_curves_that_contradict_each_other_are_refused(
    kept: list[int], changes: dict[int, dict[str, object]], message: str, copied: Path
) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    file = write_costs(bundle, cost_table(key=key))
    content = json.loads(file.read_text())
    content["curves"] = [content["curves"][index] | changes.get(index, {}) for index in kept]
    file.write_text(json.dumps(content))
    with pytest.raises(BundleError) as raised:
        read_costs(bundle, key)
    assert str(raised.value).startswith(f"{file}: {message}")


def test_a_picture_does_not_outlive_its_table(copied: Path) -> None:
    bundle, key = Bundle.open(copied), key_of(copied)
    drawn = write_costs(bundle, cost_table(key=key), b"first").with_suffix(".png")
    write_costs(bundle, cost_table(key=key), b"second")
    assert drawn.read_bytes() == b"second"
    write_costs(bundle, cost_table(key=key))
    assert not drawn.exists()
