"""QNN: which of a chip's processors it takes."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from dspark.providers import LoadOptions, find_provider
from tests.support.fake_onnxruntime import FakeDevice, Install

MODEL = Path("target.onnx")


@pytest.mark.parametrize(
    ("options", "kind"), [({}, "NPU"), ({"backend_type": "gpu"}, "GPU"), ({"backend_type": "cpu"}, "CPU")]
)
def test_qnn_takes_the_device_of_its_backend(options: Mapping[str, str], kind: str, install: Install) -> None:
    qnn = find_provider("qnn")
    devices = [FakeDevice("QNNExecutionProvider", each) for each in ("CPU", "GPU", "NPU")]
    runtime = install(qnn, libraries={"/vendor/plugin.so": devices})
    qnn.open(MODEL, LoadOptions(options=options))
    added = runtime.sessions[0][0].added
    assert added is not None
    assert [device.kind for device in added[0]] == [kind]
