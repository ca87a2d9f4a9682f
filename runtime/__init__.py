"""Runs exported bundles: draft, schedule, verify, accept, without PyTorch.

    from dspark.runtime import DSparkInference, SamplingParams

    with DSparkInference.load("bundle") as model:
        (done,) = model.generate(["Why is the sky blue?"], SamplingParams(max_new_tokens=64))

Names are loaded when they are first used, so importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark.runtime.bundle.bundle import Bundle
    from dspark.runtime.conversation import Conversation
    from dspark.runtime.decoding.sampling_params import SamplingParams
    from dspark.runtime.engine.request import Completion, Priority, Request, Stats
    from dspark.runtime.errors import BundleError, DSparkError, NumericalError, ProviderError, RequestError
    from dspark.runtime.inference import Chunk, DSparkInference
    from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = [
    "Bundle",
    "BundleError",
    "Chunk",
    "Completion",
    "Conversation",
    "DSparkError",
    "DSparkInference",
    "NumericalError",
    "Priority",
    "ProviderError",
    "Request",
    "RequestError",
    "SamplingParams",
    "SpeculationOptions",
    "Stats",
]

_MODULES = {
    "Bundle": "bundle.bundle",
    "Chunk": "inference",
    "Completion": "engine.request",
    "Conversation": "conversation",
    "DSparkInference": "inference",
    "Priority": "engine.request",
    "Request": "engine.request",
    "SamplingParams": "decoding.sampling_params",
    "SpeculationOptions": "scheduling.options",
    "Stats": "engine.request",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
