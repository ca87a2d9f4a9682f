"""OpenVINO: its devices, and what it compiles for them."""

import json
from pathlib import Path

import pytest

from dspark.providers import CompileOptions, LoadOptions, OnnxRuntimeProvider, ProviderError, find_provider
from tests.support.fake_onnxruntime import FakeDevice, Install

MODEL = Path("target.onnx")


def test_openvino_takes_the_device_that_is_named(install: Install) -> None:
    openvino = find_provider("openvino")
    devices = [FakeDevice("OpenVINOExecutionProvider", kind, {"ov_device": kind}) for kind in ("CPU", "GPU", "NPU")]
    runtime = install(openvino, libraries={"/vendor/plugin.so": devices})
    openvino.open(MODEL, LoadOptions(options={"device_type": "gpu", "load_config": "{}"}))
    assert runtime.sessions[0][0].added == ([devices[1]], {"load_config": "{}"})
    with pytest.raises(ProviderError, match=r"openvino: there is no device 'GPU\.1'; there are: CPU, GPU, NPU"):
        openvino.open(MODEL, LoadOptions(options={"device_type": "GPU.1"}))
    assert [openvino.needs_static_shapes({"device_type": kind}) for kind in ("CPU", "npu", "GPU")] == [0, 1, 0]


def test_openvino_built_into_onnx_runtime_takes_it_as_an_option(install: Install) -> None:
    runtime = install(built_in=("OpenVINOExecutionProvider",))
    find_provider("openvino").open(MODEL, LoadOptions(options={"device_type": "GPU"}))
    exact = {"EXECUTION_MODE_HINT": "ACCURACY"}
    ((name, options),) = runtime.sessions[0][1]
    assert (name, options["device_type"]) == ("OpenVINOExecutionProvider", "GPU")
    assert json.loads(options["load_config"]) == {"CPU": exact, "GPU": exact}


def test_openvino_without_its_reader_is_refused_before_it_compiles(install: Install, tmp_path: Path) -> None:
    """As onnxruntime-openvino 1.24 is."""
    openvino = find_provider("openvino")
    folder = tmp_path / "onnxruntime"
    (folder / "capi").mkdir(parents=True)
    install(built_in=("OpenVINOExecutionProvider",), __file__=str(folder / "__init__.py"))
    with pytest.raises(ProviderError, match=r"openvino: .* no openvino_ir_frontend, .*the plug-in .* has it: pip inst"):
        openvino.require_compiler()
    openvino.require_compiler({"device_type": "NPU"})
    (folder / "capi" / "libopenvino_ir_frontend.so.2541").touch()
    openvino.require_compiler()
    install(openvino, libraries={"/vendor/plugin.so": [FakeDevice("OpenVINOExecutionProvider", "CPU")]})
    openvino.require_compiler()


def test_code_for_a_gpu_is_for_its_model(install: Install, graph: Path) -> None:
    openvino = find_provider("openvino")
    assert isinstance(openvino, OnnxRuntimeProvider)

    def devices(gpu: str) -> None:
        there = {"CPU": "Xeon", "GPU": gpu}
        drives = [
            FakeDevice("OpenVINOExecutionProvider", kind, {"ov_device": kind, "FULL_DEVICE_NAME": name})
            for kind, name in there.items()
        ]
        install(openvino, libraries={"/vendor/plugin.so": drives})

    devices("Arc A770")
    gpu = LoadOptions(options={"device_type": "GPU"})
    assert "openvino (device_type=GPU (Arc A770)) with" in openvino.compile(graph, CompileOptions("fp16", gpu.options))
    devices("Arc B580")
    expected = r"built for device 'device_type=GPU \(Arc A770\)', but here it is 'device_type=GPU \(Arc B580\)'"
    with pytest.raises(ProviderError, match=expected):
        openvino.open(graph, gpu)
    assert "openvino (device_type=CPU) with" in openvino.compile(graph, CompileOptions("fp16"))
