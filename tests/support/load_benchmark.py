"""The load benchmark on golden models."""

from pathlib import Path

from rich.console import Console

from dspark.runtime import SpeculationOptions
from dspark.runtime.measuring.load import run_load_benchmark
from dspark.runtime.measuring.load_figures import LoadReport, LoadSettings
from tests.support.golden_models import PROMPTS

__all__ = ["ROWS", "measure"]

ROWS = [{"prompt_ids": prompt} for prompt in PROMPTS[:3]]


def measure(bundle: Path, **settings: object) -> LoadReport:
    chosen = LoadSettings.model_validate({"threads": 1, "max_new_tokens": 16, **settings})
    return run_load_benchmark(bundle, ROWS, SpeculationOptions(), chosen, Console(quiet=True))
