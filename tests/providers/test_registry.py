"""Finding a provider, opening a session, and what each failure says."""

import gc
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from dspark.providers import (
    PROVIDERS,
    DSparkError,
    LoadOptions,
    OnnxRuntimeProvider,
    ProviderError,
    find_provider,
    registry,
)

ROOT = Path(__file__).parents[2]
GoldenBundle = Callable[[str], Path]


@pytest.fixture
def head(golden_bundle: GoldenBundle) -> Path:
    return golden_bundle("dflash") / "head.onnx"


@pytest.mark.parametrize("name", ["cpu", "CPU", "CPUExecutionProvider", "cpuexecutionprovider"])
def test_names_and_aliases_in_any_case(name: str) -> None:
    assert find_provider(name).name == "cpu"


def test_no_two_providers_share_a_name() -> None:
    names = [name.lower() for provider in PROVIDERS for name in (provider.name, *provider.aliases)]
    assert len(set(names)) == len(names)
    assert [find_provider(provider.name) for provider in PROVIDERS] == list(PROVIDERS)


def test_a_description_is_called_as_its_provider() -> None:
    """So that one name stands for one thing in all of the package."""
    for provider in PROVIDERS:
        assert getattr(registry, provider.name.upper().replace("-", "_")) is provider


@pytest.mark.parametrize("name", ["cpuu", "cp", "Cpou"])
def test_a_misspelt_name_gets_a_suggestion(name: str) -> None:
    with pytest.raises(ProviderError, match=rf"'{name}'; known providers: .*cpu.* Did you mean 'cpu'\?"):
        find_provider(name)


@pytest.mark.parametrize("name", ["", "quantum"])
def test_another_name_gets_the_list(name: str) -> None:
    with pytest.raises(ProviderError, match=f"'{name}'; known providers: .*cpu") as raised:
        find_provider(name)
    assert "Did you mean" not in str(raised.value)


def test_a_provider_that_this_build_lacks_is_no_silent_cpu(head: Path) -> None:
    lacking = OnnxRuntimeProvider(
        name="lacking", execution_provider="NoSuchExecutionProvider", precisions=frozenset(), install="pip install it"
    )
    with pytest.raises(ProviderError, match=r"NoSuchExecutionProvider is not in .*; pip install it") as raised:
        lacking.open(head, LoadOptions(threads=1))
    assert lacking.discover().problem == str(raised.value)
    for name in onnxruntime.get_available_providers():
        assert name in str(raised.value)


def test_without_onnx_runtime_the_error_names_the_extras(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ProviderError, match="ONNX Runtime is not installed") as raised:
        find_provider("cpu").open(head, LoadOptions(threads=1))
    message = str(raised.value)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    runtimes = [extra for extra, needs in extras.items() if any(need.startswith("onnxruntime") for need in needs)]
    assert "cpu" in runtimes
    for extra in runtimes:
        assert extra in message


@pytest.mark.parametrize("content", [b"", b"no graph", None])
def test_a_graph_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "broken.onnx"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ProviderError, match=r"broken\.onnx: CPUExecutionProvider cannot load the graph"):
        find_provider("cpu").open(file, LoadOptions(threads=1))


def test_a_graph_without_its_weights_is_named(golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    file = tmp_path / "target.onnx"
    file.write_bytes((golden_bundle("dflash") / "target.onnx").read_bytes())
    with pytest.raises(ProviderError, match=r"target\.onnx.*cannot load the graph"):
        find_provider("cpu").open(file, LoadOptions(threads=1))


def test_errors_have_one_root() -> None:
    assert issubclass(ProviderError, DSparkError)


def test_arrays_that_do_not_fit_the_graph_are_told(head: Path) -> None:
    session = find_provider("cpu").open(head, LoadOptions(threads=1))
    inputs = {
        "hidden": np.zeros((1, 5, 64), np.float32),
        "base_logits": np.zeros((1, 5, 160), np.float32),
        "anchor_ids": np.zeros(1, np.int64),
        "uniform": np.zeros((1, 5), np.float32),
        "temperature": np.zeros(1, np.float32),
    }
    outputs = {"tokens": np.zeros((1, 5), np.int64), "draft_logits": np.zeros((1, 5, 160), np.float32)}
    session.bind(inputs, outputs).run()
    with pytest.raises(ProviderError, match=r"head\.onnx: the graph has no input other"):
        session.bind({**inputs, "other": np.zeros(1)}, outputs)
    with pytest.raises(ProviderError, match=r"base_logits has shape \[B, 5, 160\] in the graph and .* \[1, 5, 159\]"):
        session.bind({**inputs, "base_logits": np.zeros((1, 5, 159), np.float32)}, outputs)
    with pytest.raises(ProviderError, match=r"head\.onnx: input temperature \[B\] is not given"):
        session.bind({name: array for name, array in inputs.items() if name != "temperature"}, outputs)
    double = session.bind({**inputs, "base_logits": np.zeros((1, 5, 160))}, outputs)
    with pytest.raises(ProviderError, match=r"head\.onnx: the graph cannot be run: .*Unexpected input data type"):
        double.run()


@pytest.mark.parametrize("threads", [1, 2, None])
def test_a_bound_call_reads_and_writes_the_same_arrays(threads: int | None, head: Path) -> None:
    """The head of a DFlash drafter takes the likeliest token of each slot."""
    session = find_provider("cpu").open(head, LoadOptions(threads=threads))
    logits, tokens = np.zeros((2, 5, 160), np.float32), np.zeros((2, 5), np.int64)
    call = session.bind(
        {
            "hidden": np.zeros((2, 5, 64), np.float32),  # the call alone keeps these
            "base_logits": logits,
            "anchor_ids": np.zeros(2, np.int64),
            "uniform": np.zeros((2, 5), np.float32),
            "temperature": np.zeros(2, np.float32),
        },
        {"tokens": tokens, "draft_logits": np.zeros_like(logits)},
    )
    gc.collect()
    for seed in range(3):
        logits[:] = np.random.default_rng(seed).normal(size=logits.shape)
        call.run()
        assert tokens.tolist() == logits.argmax(axis=-1).tolist()
