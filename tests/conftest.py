"""Fixtures that several parts of the tests use."""

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from dspark.exporter.export import export_bundle, prepare
from dspark.runtime.bundle.manifest import CacheForm
from tests.support.costs import write_flat_costs

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parent.parent
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.content == "refuse me" %}{{ raise_exception("as you wish") }}{% endif -%}
{{ message.role[0] }}: {{ message.content }}
{% endfor -%}
a: """

settings.register_profile("any machine", deadline=None)  # a test that is slow has not failed
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def golden_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Exports a golden target (``*_target``, without a drafter) or drafter (with ``qwen3_target``), each form once.

    Its table of costs says that verifying costs nothing, so that whole drafts are verified, however fast this machine.
    """
    root = tmp_path_factory.mktemp("golden")

    @cache
    def exported(name: str, cache_form: CacheForm) -> Path:
        target, drafter = (name, None) if name.endswith("_target") else ("qwen3_target", GOLDEN / name)
        output = root / cache_form / name
        export_bundle(prepare(GOLDEN / target, drafter, output, cache_form=cache_form))
        write_flat_costs(output)
        return output

    def bundle(name: str, cache_form: CacheForm = "in-place") -> Path:
        return exported(name, cache_form)

    return bundle


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
        write_flat_costs(root / "bundles" / name)
        return root / "bundles" / name

    return bundle


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, where `make demo` keeps it or where DSPARK_SMOLLM2_GGUF says."""
    path = Path(os.environ.get("DSPARK_SMOLLM2_GGUF", ROOT / ".cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.is_file():
        pytest.skip("SmolLM2 is not there: run `make demo` once or set DSPARK_SMOLLM2_GGUF")
    return path


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with the quickstart's drafter."""
    output = tmp_path_factory.mktemp("smollm2") / "bundle"
    export_bundle(prepare(smollm2_gguf, ROOT / "samples" / "smollm2" / "drafter", output))
    return output
