"""Fixtures of the runtime's tests."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from dspark.exporter.export import export_bundle, prepare
from tests.runtime.command_line import Run, runner
from tests.runtime.golden_models import GOLDEN

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.content == "refuse me" %}{{ raise_exception("as you wish") }}{% endif -%}
{{ message.role[0] }}: {{ message.content }}
{% endfor -%}
a: """


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """As ``golden_bundle`` with ``qwen3_target``, with a chat template; no tokens are added around its text."""
    root = tmp_path_factory.mktemp("chat")
    target = shutil.copytree(GOLDEN / "qwen3_target", root / "target")
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE)

    @cache
    def bundle(name: str) -> Path:
        drafter = None if name == "qwen3_target" else GOLDEN / name
        export_bundle(prepare(target, drafter, root / "bundles" / name))
        return root / "bundles" / name

    return bundle


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``dspark-run``."""
    return runner(monkeypatch, capsys)
