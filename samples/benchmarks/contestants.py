"""Who races: the peers' environments, the models made for them, and how each of them is run."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dspark.runtime import SpeculationOptions
from dspark.runtime.bundle.bundle import Bundle

__all__ = ["CONTESTANTS", "CONVERSIONS", "ENVIRONMENTS", "SHIPPED", "Contestant", "Conversion", "Environment", "Peer"]
__all__ += ["Folders", "ours"]

SHIPPED = "Q4_1.gguf"
"""The model as it is distributed; the others are converted from it."""

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Folders:
    """Where the environments and the models are.

    Attributes:
        root: The folder of all.
    """

    root: Path

    def python(self, environment: str) -> Path:
        """An environment's interpreter."""
        return self.root / environment / "bin" / "python"

    def model(self, name: str) -> Path:
        """A model's file or folder."""
        return self.root / "models" / name


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Attributes:
        requirements: What pip installs.
        variables: Environment variables for it, for what is compiled.
    """

    requirements: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Conversion:
    """How a model is made.

    Attributes:
        environment: Runs it.
        command: Arguments of its Python; ``{source}`` and ``{output}`` stand for paths.
        source: The model that it starts from.
    """

    environment: str
    command: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Peer:
    """Another engine with one model.

    Attributes:
        environment: Where it is installed.
        worker: Module in ``workers`` that serves it.
        model: What it loads.
        arguments: More of the worker's arguments.
    """

    environment: str
    worker: str
    model: str
    arguments: tuple[str, ...] = ()

    def contestant(self, name: str, folders: Folders) -> "Contestant":
        """The peer where it is installed."""
        python, model = folders.python(self.environment), folders.model(self.model)
        return Contestant(name, python, self.worker, model, self.arguments, peer=True)


@dataclass(frozen=True)
class Contestant:
    """What starts one worker.

    Attributes:
        name: Its name in tables.
        python: The interpreter.
        worker: Module in ``workers``.
        model: What it loads.
        arguments: More of the worker's arguments.
        peer: Whether it is another project's.
    """

    name: str
    python: Path
    worker: str
    model: Path
    arguments: tuple[str, ...]
    peer: bool

    @property
    def installed(self) -> bool:
        """Whether its environment and its model are there."""
        return self.python.exists() and self.model.exists()

    def command(self, threads: int, context_length: int) -> list[str]:
        """The worker's command line, to be run in this sample's folder."""
        worker = [str(self.python.absolute()), "-m", f"workers.{self.worker}", str(self.model.absolute())]
        return [*worker, f"--threads={threads}", f"--context-length={context_length}", *self.arguments]


ENVIRONMENTS = {
    "genai": Environment(("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0")),
    "openvino": Environment(("openvino-genai==2026.4.1.0",)),
    # Compiled for this processor; without the vision library, which the race does not need.
    "llama-cpp": Environment(("llama-cpp-python==0.3.36",), {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}),
    # ONNX Runtime GenAI is here too, because its model builder needs PyTorch.
    "transformers": Environment(
        (
            "torch==2.13.0",
            "transformers==5.24.0",
            "accelerate==1.15.0",
            "gguf==0.19.0",
            "onnx==1.23.2",
            "onnx-ir==1.1.0",
            "onnxruntime-genai==0.18.0",
            "onnxruntime==1.32.0",
        )
    ),
}


def _requantized(kind: str) -> Conversion:
    script = str(HERE / "converters" / "requantize.py")
    return Conversion("llama-cpp", (script, kind, "{source}", "{output}"), SHIPPED)


def _built(precision: str) -> Conversion:
    builder = ("-m", "onnxruntime_genai.models.builder", "-i", "{source}", "-o", "{output}", "-c", "{output}/.cache")
    return Conversion("transformers", (*builder, "-e", "cpu", "-p", precision), "huggingface")


# A model stands behind the one it is made from.
CONVERSIONS = {
    "F32.gguf": _requantized("F32"),
    "F16.gguf": _requantized("F16"),
    "Q8_0.gguf": _requantized("Q8_0"),
    "Q4_0.gguf": _requantized("Q4_0"),
    "huggingface": Conversion(
        "transformers", (str(HERE / "converters" / "to_huggingface.py"), "{source}", "{output}"), SHIPPED
    ),
    "genai-fp32": _built("fp32"),
    "genai-int8": _built("int8"),
    "genai-int4": _built("int4"),
}

LOOKUP = ("--prompt-lookup=5",)

CONTESTANTS = {
    "genai fp32": Peer("genai", "genai", "genai-fp32"),
    "genai int8": Peer("genai", "genai", "genai-int8"),
    "genai int4": Peer("genai", "genai", "genai-int4"),
    "llama.cpp F32": Peer("llama-cpp", "llama_cpp", "F32.gguf"),
    "llama.cpp Q8_0": Peer("llama-cpp", "llama_cpp", "Q8_0.gguf"),
    "llama.cpp Q4_0": Peer("llama-cpp", "llama_cpp", "Q4_0.gguf"),
    "llama.cpp Q4_1": Peer("llama-cpp", "llama_cpp", SHIPPED),
    "llama.cpp Q4_0 lookup": Peer("llama-cpp", "llama_cpp", "Q4_0.gguf", LOOKUP),
    "transformers": Peer("transformers", "transformers", "huggingface"),
    "transformers lookup": Peer("transformers", "transformers", "huggingface", LOOKUP),
    "openvino F16": Peer("openvino", "openvino", "F16.gguf", ("--arithmetic=f32",)),  # it reads no F32
    "openvino Q8_0": Peer("openvino", "openvino", "Q8_0.gguf"),
    "openvino Q4_0": Peer("openvino", "openvino", "Q4_0.gguf"),
    "openvino Q4_1": Peer("openvino", "openvino", SHIPPED),
    "openvino Q4_1 lookup": Peer("openvino", "openvino", SHIPPED, LOOKUP),
}


def ours(name: str, path: Path, speculation: SpeculationOptions) -> list[Contestant]:
    """A bundle run plainly and, if it has a drafter, with speculation.

    Args:
        name: What to call it.
        path: The bundle.
        speculation: How to speculate; a confidence threshold is only for drafters that have confidences.

    Raises:
        BundleError: There is no bundle.
    """
    manifest = Bundle.open(path, check_hashes=False).manifest
    ways = {f"{name} plain": ["--scheduler=off"]}
    if manifest.drafter is not None:
        arguments = ways[f"{name} speculative"] = []
        if speculation.max_draft_tokens is not None:
            arguments.append(f"--max-draft-tokens={speculation.max_draft_tokens}")
        if speculation.confidence_threshold is not None and manifest.has_confidence:
            arguments.append(f"--confidence-threshold={speculation.confidence_threshold}")
    python = Path(sys.executable)
    return [
        Contestant(f"dspark {way}", python, "dspark", path, tuple(arguments), peer=False)
        for way, arguments in ways.items()
    ]
