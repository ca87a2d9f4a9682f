"""Intel processors, GPUs and NPUs through OpenVINO.

Sources: onnxruntime.ai, "Intel - OpenVINO"; pypi.org, onnxruntime-ep-openvino.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.providers.errors import ProviderError
from dspark.providers.monitors import IntelNpuMonitor
from dspark.providers.onnxruntime.provider import OnnxRuntimeProvider, Plugin, import_onnxruntime
from dspark.providers.provider import NOTHING

__all__ = ["OPENVINO"]

DEVICE = "device_type"
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
"""Computes in the types that the graph has: else OpenVINO rounds activations to int8 beside int8 weights, and to
bfloat16 or float16 where the device is faster with them, and the output is not the model's."""

READER = "openvino_ir_frontend"
"""The library that reads models compiled for processors."""


@dataclass(frozen=True, kw_only=True)
class OpenVinoProvider(OnnxRuntimeProvider):
    """OpenVINO, built into ONNX Runtime or as a plug-in, which takes its device as an object instead of an option."""

    def default_options(self, threads: int | None) -> dict[str, str]:
        """Exact computation, and the host's threads."""
        cpu = EXACT if threads is None else {**EXACT, "INFERENCE_NUM_THREADS": str(threads)}
        return {**super().default_options(threads), "load_config": json.dumps({"CPU": cpu, "GPU": EXACT})}

    def needs_static_shapes(self, options: Mapping[str, str]) -> bool:
        """An NPU takes graphs of fixed shapes only; processors and GPUs take any."""
        return options.get(DEVICE, "").upper().startswith("NPU")

    def select(self, devices: Sequence[Any], options: Mapping[str, str]) -> tuple[Sequence[Any], dict[str, str]]:
        """The plug-in's device that ``device_type`` names."""
        others = {name: value for name, value in options.items() if name != DEVICE}
        wanted = options[DEVICE].upper()
        chosen = [device for device in devices if device.ep_metadata.get("ov_device", "").upper() == wanted]
        if not chosen:
            there = ", ".join(device.ep_metadata.get("ov_device", "?") for device in devices)
            raise ProviderError(f"{self.name}: there is no device {options[DEVICE]!r}; there are: {there}")
        return chosen[:1], others

    def require_compiler(self, options: Mapping[str, str] = NOTHING) -> None:
        """Needs also, for processors, the library that reads compiled models, which onnxruntime-openvino lacks."""
        super().require_compiler(options)
        runtime = import_onnxruntime()
        without_plugin = not self._devices(runtime) and options.get(DEVICE, "CPU").upper() == "CPU"
        if without_plugin and not any(Path(runtime.__file__).parent.glob(f"capi/*{READER}*")):
            raise ProviderError(
                f"{self.name}: this ONNX Runtime has no {READER}, without which OpenVINO cannot read what it compiles "
                f"for processors; the plug-in onnxruntime-ep-openvino has it: {self.install}"
            )

    def compiled_device(self, options: Mapping[str, str]) -> str:
        """With the model of a GPU or an NPU, where the plug-in tells: code for these is for one, for processors not."""
        device, passed = super().compiled_device(options), {**dict(self.defaults), **options}
        devices = self._devices(import_onnxruntime())
        if not devices or passed[DEVICE].upper() == "CPU":
            return device
        (chosen,), _ = self.select(devices, passed)
        return f"{device} ({chosen.ep_metadata.get('FULL_DEVICE_NAME', 'unknown')})"


OPENVINO = OpenVinoProvider(
    name="openvino",
    aliases=("OpenVINOExecutionProvider", "intel"),
    execution_provider="OpenVINOExecutionProvider",
    plugin=Plugin(
        "onnxruntime_ep_openvino",
        "onnxruntime-ep-openvino",
        "processors, GPUs and NPUs of Intel; for other processors pip install onnxruntime-openvino instead",
    ),
    precisions=frozenset({"fp32", "fp16", "int8-weights"}),
    cache_forms=frozenset({"delta"}),
    options=frozenset(
        {
            "cache_dir",
            DEVICE,
            "disable_dynamic_shapes",
            "enable_qdq_optimizer",
            "layout",
            "load_config",
            "model_priority",
            "num_of_threads",
            "num_streams",
            "precision",
            "reshape_input",
        }
    ),
    defaults=((DEVICE, "CPU"),),
    run_options=frozenset({"cache_dir", "model_priority", "num_of_threads", "num_streams"}),
    install="pip install 'dspark-onnx[openvino]'",
    monitor=IntelNpuMonitor(),
)
