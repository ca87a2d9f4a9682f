"""What providers pass to ONNX Runtime, checked at its boundary; real ones are in the tests marked ``providers``."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dspark.providers import (
    PROVIDERS,
    LoadOptions,
    OnnxRuntimeProvider,
    PluginError,
    ProviderError,
    Selection,
    find_provider,
)
from tests.support.fake_onnxruntime import FakeDevice, Install

MODEL = Path("target.onnx")
ORT_PROVIDERS = [each for each in PROVIDERS if isinstance(each, OnnxRuntimeProvider)]
PLUGINS = [each for each in ORT_PROVIDERS if each.plugin is not None]
BUILT_IN = [each for each in ORT_PROVIDERS if each.plugin is None and each.name != "cpu"]
# From the vendors' documentation: the name in ONNX Runtime, and the options that are passed when none are given.
DOCUMENTED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "cuda": ("CUDAExecutionProvider", {"use_tf32": "0"}),
    "tensorrt-ort": ("TensorrtExecutionProvider", {}),
    "nv-tensorrt-rtx": ("NvTensorRTRTXExecutionProvider", {}),
    "openvino": ("OpenVINOExecutionProvider", {"device_type": "CPU"}),
    "qnn": ("QNNExecutionProvider", {"backend_type": "htp"}),
    "cann": ("CANNExecutionProvider", {"precision_mode": "must_keep_origin_dtype"}),
    "vitis-ai": ("VitisAIExecutionProvider", {}),
    "migraphx": ("MIGraphXExecutionProvider", {}),
    "coreml": ("CoreMLExecutionProvider", {"ModelFormat": "MLProgram", "RequireStaticInputShapes": "1"}),
    "webgpu": ("WebGpuExecutionProvider", {"enableInt64": "1"}),
    "ggml": ("ggml", {"sticky": "0", "weights": "f32"}),
}


def test_every_vendor_is_listed_once() -> None:
    assert {each.name for each in ORT_PROVIDERS} == {"cpu", *DOCUMENTED}
    for name, (execution_provider, defaults) in DOCUMENTED.items():
        provider = find_provider(execution_provider)
        assert isinstance(provider, OnnxRuntimeProvider)
        assert (provider.name, provider.execution_provider) == (name, execution_provider)
        assert set(dict(provider.defaults)) <= provider.options
        assert defaults.items() <= dict(provider.defaults).items()
        assert provider.install


@pytest.mark.parametrize("provider", BUILT_IN, ids=lambda provider: provider.name)
def test_a_provider_built_into_onnx_runtime(provider: OnnxRuntimeProvider, install: Install) -> None:
    runtime = install(built_in=(provider.execution_provider,))
    assert provider.discover().problem is None
    option = min(provider.options - set(dict(provider.defaults)))
    provider.open(MODEL, LoadOptions(threads=3, options={option: "7"}, dimensions={"B": 2}))
    (options, providers), *_ = runtime.sessions
    assert providers == [(provider.execution_provider, {**dict(provider.defaults), option: "7"})]
    assert options.added is None
    assert options.dimensions == {"B": 2}
    assert options.intra_op_num_threads == 3


@pytest.mark.parametrize("name", ["cuda", "tensorrt", "tensorrt-rtx"])
def test_a_gpu_is_named_as_cuda_names_it(name: str, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = find_provider(name)
    install()
    assert provider.device_name() == "Fake GPU"
    assert Selection.parse([f"target={name}", "target=cpu"]).device_name("target") == "Fake GPU"
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert provider.device_name() is None
    assert Selection.parse([name, "cpu"]).device_name("target") is None


@pytest.mark.parametrize("provider", PLUGINS, ids=lambda provider: provider.name)
def test_a_provider_that_a_library_brings(provider: OnnxRuntimeProvider, install: Install) -> None:
    device = FakeDevice(provider.execution_provider, ep_metadata={"ov_device": "CPU"})
    runtime = install(provider, libraries={"/vendor/plugin.so": [device, FakeDevice("another", "GPU")]})
    assert provider.discover().devices == ("CPU (Vendor)",)
    provider.open(MODEL)
    provider.open(MODEL)
    assert runtime.registered == {provider.execution_provider: "/vendor/plugin.so"}  # once
    (options, providers), *_ = runtime.sessions
    assert providers is None
    assert options.added is not None
    devices, passed = options.added
    assert devices == [device]
    # OpenVINO's plug-in takes its device as an object.
    assert passed == {name: value for name, value in provider.default_options(None).items() if name != "device_type"}


def test_threads_are_passed_to_those_that_have_their_own(install: Install) -> None:
    for name in ("openvino", "ggml"):
        provider = find_provider(name)
        assert isinstance(provider, OnnxRuntimeProvider)
        runtime = install(built_in=(provider.execution_provider,))
        provider.open(MODEL, LoadOptions(threads=3))
        assert '"3"' in json.dumps(runtime.sessions[0][1]).replace("\\", "")


# --- what fails says what and where ---


@pytest.mark.parametrize("provider", [*PLUGINS, *BUILT_IN], ids=lambda provider: provider.name)
def test_a_provider_that_is_absent_is_no_silent_cpu(provider: OnnxRuntimeProvider, install: Install) -> None:
    install(built_in=("AzureExecutionProvider",))
    with pytest.raises(ProviderError) as raised:
        provider.open(MODEL)
    message = str(raised.value)
    assert "is not in this ONNX Runtime (AzureExecutionProvider, CPUExecutionProvider)" in message
    assert provider.install in message
    assert provider.discover().problem == message


def test_a_device_that_is_absent_is_no_silent_cpu(install: Install) -> None:
    install(built_in=("CUDAExecutionProvider",), started=False)
    with pytest.raises(ProviderError, match=r"CUDAExecutionProvider did not start, .* CPUExecutionProvider instead"):
        find_provider("cuda").open(MODEL)


def test_a_library_without_a_device_says_what_it_drives(install: Install) -> None:
    openvino = find_provider("openvino")
    install(openvino, libraries={"/vendor/plugin.so": []})
    for _ in range(2):  # it is registered by then
        with pytest.raises(ProviderError, match=r"onnxruntime-ep-openvino .* no device that it drives \(.*Intel"):
            openvino.open(MODEL)


@pytest.mark.parametrize("provider", PLUGINS, ids=lambda provider: provider.name)
def test_a_library_for_another_runtime_is_named_with_both_versions(
    provider: OnnxRuntimeProvider, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(provider, refuses="The requested API version [29] is not available, only [1, 25] are supported")
    monkeypatch.setattr("dspark.providers.onnxruntime.library.metadata.version", lambda name: "9.8.7")
    assert provider.plugin is not None
    with pytest.raises(PluginError) as raised:
        provider.open(MODEL)
    expected = f"/vendor/plugin.so: {provider.plugin.distribution} 9.8.7 cannot be loaded by ONNX Runtime 1.32.0: "
    assert str(raised.value).startswith(expected)
    assert "API version [29]" in str(raised.value)
    assert provider.discover().problem == str(raised.value)


FALLEN = [(f"layers.{index}/mlp/Sigmoid_7", "Sigmoid") for index in range(14)]


@pytest.mark.parametrize(
    "provider",
    [each for each in (*PLUGINS, *BUILT_IN) if each.name != "cpu"],
    ids=lambda provider: provider.name,
)
def test_nodes_that_would_fall_are_named_and_nothing_falls(provider: OnnxRuntimeProvider, install: Install) -> None:
    device = FakeDevice(provider.execution_provider, ep_metadata={"ov_device": "CPU"})
    state: dict[str, Any] = {"libraries": {"/vendor/plugin.so": [device]}}
    if provider.plugin is None:
        state = {"built_in": (provider.execution_provider,)}
    runtime = install(provider, fallen=FALLEN, **state)
    with pytest.raises(ProviderError) as raised:
        provider.open(MODEL)
    message = str(raised.value)
    assert f"{provider.name} cannot run 14 of the graph's nodes: layers.0/mlp/Sigmoid_7 (Sigmoid), " in message
    assert "and 2 more" in message
    assert "--allow-fallback" in message
    provider.open(MODEL, LoadOptions(allow_fallback=True))
    assert "session.disable_cpu_ep_fallback" not in runtime.sessions[-1][0].config
    where = {node.name: node.provider for node in provider.placement(MODEL)}
    assert where == {"taken": provider.execution_provider, **dict.fromkeys(dict(FALLEN), "CPUExecutionProvider")}


def test_shapes_may_be_computed_on_the_host_beside_providers_that_run_kernel_by_kernel(install: Install) -> None:
    install(built_in=("CUDAExecutionProvider",), fallen=[("rope/Shape_1", "Shape"), ("rope/Concat_2", "Concat")])
    find_provider("cuda").open(MODEL)
    install(built_in=("CUDAExecutionProvider",), fallen=[("rope/Shape_1", "Shape"), ("mlp/Gemm_2", "Gemm")])
    with pytest.raises(ProviderError, match=r"cuda cannot run 1 of the graph's nodes: mlp/Gemm_2 \(Gemm\); "):
        find_provider("cuda").open(MODEL)


@pytest.mark.parametrize("provider", [*PLUGINS, *BUILT_IN], ids=lambda provider: provider.name)
def test_an_unknown_option_is_refused_with_the_known_ones(provider: OnnxRuntimeProvider, install: Install) -> None:
    install(built_in=(provider.execution_provider,))
    known = max(provider.options, key=len)
    with pytest.raises(ProviderError, match=rf"{provider.name} has no option '{known}x'; it has: .*{known}") as raised:
        provider.open(MODEL, LoadOptions(options={f"{known}x": "1"}))
    assert f"Did you mean {known!r}?" in str(raised.value)
