"""The sample package that adds a provider, installed as users install it; and packages that do it wrongly."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark.providers import (
    DEFAULT_LOADING,
    LoadOptions,
    OnnxRuntimeProvider,
    Provider,
    ProviderError,
    Session,
    added_providers,
    find_provider,
)
from dspark.providers.descriptions.cpu import CPU
from dspark.runtime import DSparkInference, SamplingParams
from tests.runtime.command_line import runner

SAMPLE = Path(__file__).parents[2] / "samples" / "custom_provider"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the sample is installed in."""
    root = tmp_path_factory.mktemp("sample")
    source = shutil.copytree(SAMPLE, root / "source")  # building leaves files beside the sources
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--no-index", "--target", str(root / "site"), str(source)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return root / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(site))
    yield
    sys.modules.pop("plain_cpu", None)


@pytest.mark.usefixtures("installed")
def test_a_package_adds_a_provider_without_a_change_here(golden_bundle: Callable[[str], Path]) -> None:
    provider = find_provider("Plain-CPU")
    assert isinstance(provider, OnnxRuntimeProvider)
    bundle = golden_bundle("dspark_vanilla")
    plain, optimised = (each.placement(bundle / "drafter.onnx") for each in (provider, find_provider("cpu")))
    assert len(plain) > len(optimised)  # ONNX Runtime's optimisations remove nodes
    params = SamplingParams(max_new_tokens=16)
    outputs = [
        DSparkInference.load(bundle, provider=name, threads=1).generate(["tead "], params)[0].token_ids
        for name in ("plain-cpu", "cpu")
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.usefixtures("installed")
def test_it_is_listed_and_suggested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = runner(monkeypatch, capsys)("providers", "--json")
    assert '"name": "plain-cpu"' in result.out
    with pytest.raises(ProviderError, match=r"'plain-cqu'; known providers: .*plain-cpu\. Did you mean 'plain-cpu'\?"):
        find_provider("plain-cqu")


def test_it_is_gone_with_its_package() -> None:
    with pytest.raises(ProviderError, match="Unknown provider 'plain-cpu'"):
        find_provider("plain-cpu")


@dataclass(frozen=True, kw_only=True)
class OtherRuntime(Provider):
    """What a package for another runtime than ONNX Runtime has to write; here it borrows the CPU provider's session."""

    opened: list[Path]

    def open(self, model: Path, how: LoadOptions = DEFAULT_LOADING) -> Session:
        self.check_options(how.options)
        self.opened.append(model)
        return CPU.open(model, LoadOptions(how.threads))


def test_another_runtime_needs_a_session_and_nothing_else(
    golden_bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = OtherRuntime(name="other", precisions=frozenset({"fp32"}), options=frozenset({"speed"}), opened=[])
    monkeypatch.setattr("dspark.providers.registry.added_providers", lambda: {"other": other})
    bundle, params = golden_bundle("dspark_vanilla"), SamplingParams(max_new_tokens=16)
    outputs = [
        DSparkInference.load(bundle, provider=provider, threads=1).generate(["tead "], params)[0].token_ids
        for provider in ("target=other:speed=2", "cpu")
    ]
    assert outputs[0] == outputs[1]
    assert [file.name for file in other.opened] == ["target.onnx"]
    run = runner(monkeypatch, capsys)
    profile = ("bench", bundle, "--profile-graph", "--scheduler", "fixed", "--provider", "other")
    for arguments, message in (
        (("inspect", bundle, "--placement", "--provider", "other"), "other does not tell where a graph's nodes run"),
        (profile, "other does not tell where a graph's time goes"),
    ):
        result = run(*arguments)
        assert (result.code, result.error) == (1, f"error: {message}\n")
    with pytest.raises(ProviderError, match="other compiles nothing ahead of time"):
        other.require_compiler()


WRONG = {
    "raise RuntimeError('no licence')": r"mine: mine 3\.1 cannot be loaded: RuntimeError: no licence",
    "PROVIDER = 7": r"mine: mine 3\.1 adds 7; it must be an object of a class derived from Provider",
    "from dspark.providers import PROVIDERS\nPROVIDER = PROVIDERS[0]": (
        r"mine: mine 3\.1 calls its provider '(cpu|cpuexecutionprovider)', as cpu is called already"
    ),
}


@pytest.mark.parametrize("code", WRONG, ids=["raises", "no provider", "name taken"])
def test_a_package_that_does_it_wrongly_is_named_and_harms_no_other(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(code)
    info = tmp_path / "mine-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text("[dspark.providers]\nmine = mine:PROVIDER\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ProviderError, match=WRONG[code]):
        find_provider("mine")
    assert find_provider("cpu").name == "cpu"
    assert isinstance(added_providers()["mine"], ProviderError)
    listed = runner(monkeypatch, capsys)("providers")
    assert listed.code == 0
    assert "mine" in listed.out
    monkeypatch.delitem(sys.modules, "mine", raising=False)
