"""An engine of golden models with settings, moved on by hand."""

from collections.abc import Sequence
from pathlib import Path

from dspark.runtime import DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.engine.request import Request
from dspark.runtime.engine.settings import EngineSettings
from tests.support.golden_models import PROMPTS, Arrays, Tamper, tampered

__all__ = ["FIXED", "LONG", "OFF", "THRESHOLD", "drain", "nothing", "served", "submitted"]

FIXED, THRESHOLD = SpeculationOptions("fixed"), SpeculationOptions("threshold", confidence_threshold=0.6)
OFF = SpeculationOptions("off")
LONG = [token for prompt in PROMPTS for token in prompt] * 2


def nothing(graph: str, inputs: Arrays, outputs: Arrays) -> None:
    """Tampers with nothing."""


def served(
    bundle: Path,
    batch_size: int,
    engine_settings: EngineSettings,
    options: SpeculationOptions = FIXED,
    tamper: Tamper = nothing,
) -> DSparkInference:
    return tampered(bundle, tamper, batch_size, options, engine_settings)


def submitted(inference: DSparkInference, *lengths: int, prompt: Sequence[int] = PROMPTS[0]) -> list[Request]:
    """Requests that generate so many tokens each."""
    requests = [inference.request(prompt, SamplingParams(max_new_tokens=length)) for length in lengths]
    for request in requests:
        inference.engine.submit(request)
    return requests


def drain(inference: DSparkInference) -> None:
    while not inference.engine.idle:
        inference.engine.step()
