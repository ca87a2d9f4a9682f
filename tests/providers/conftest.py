"""What tests of several folders use."""

from functools import partial
from pathlib import Path

import pytest

from tests.support import fake_onnxruntime
from tests.support.fake_onnxruntime import Install


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces ONNX Runtime, and the package of a plug-in."""
    return partial(fake_onnxruntime.install, monkeypatch)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A file that stands for a graph, in a folder of its own."""
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "target.onnx").write_bytes(b"graph")
    return tmp_path / "bundle" / "target.onnx"
