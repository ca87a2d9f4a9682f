"""The golden models, loaded for tests of the runtime; their tokens are character codes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dspark.providers import Call, Session
from dspark.runtime import Bundle, Completion, DSparkInference, SpeculationOptions
from dspark.runtime.bundle.contract import CHOICES, LOGIT_SUMS
from dspark.runtime.costs.table import CostTable
from dspark.runtime.engine.settings import EngineSettings
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.loading.sessions import open_sessions
from dspark.runtime.scheduling.options import SchedulerName

__all__ = [
    "DRAFTERS",
    "GOLDEN",
    "PROMPTS",
    "Tamper",
    "ids",
    "load",
    "load_with_costs",
    "outcome",
    "tampered",
    "tampered_sessions",
    "whole_drafts",
]

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS: list[list[int]] = [
    case["prompt"] for case in json.loads((GOLDEN / "qwen3_target" / "golden.json").read_text())["greedy"]
]
DRAFTERS = ("dspark_vanilla", "dspark_gated", "dflash", "eagle3")

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
Tamper: TypeAlias = Callable[[str, Arrays, Arrays], None]
"""Called after every run of a graph with its name, inputs and outputs."""


def ids(text: str) -> list[int]:
    """The token ids of a text."""
    return [ord(character) for character in text]


def load(
    bundle: Path, batch_size: int = 1, options: SpeculationOptions | None = None, **arguments: Any
) -> DSparkInference:
    """Loads a bundle on one thread; whole drafts are verified if nothing else is asked for."""
    options = options or whole_drafts(Bundle.open(bundle))
    return DSparkInference.load(bundle, threads=1, batch_size=batch_size, options=options, **arguments)


def whole_drafts(bundle: Bundle) -> SpeculationOptions:
    """Options with which nothing depends on how fast this machine is."""
    return SpeculationOptions("off" if bundle.manifest.drafter is None else "fixed")


def load_with_costs(bundle: Path, scheduler: SchedulerName, costs: CostTable, batch_size: int = 1) -> DSparkInference:
    """Loads a bundle on one thread with a table of costs that need not be this machine's."""
    opened = Bundle.open(bundle)
    sessions = open_sessions(opened, HostOptions(threads=1), list(opened.manifest.precision))
    return DSparkInference(
        LoadedModel(opened, sessions), ServingOptions(SpeculationOptions(scheduler), batch_size), costs
    )


def tampered(
    bundle: Path,
    tamper: Tamper,
    batch_size: int = 1,
    options: SpeculationOptions | None = None,
    settings: EngineSettings | None = None,
    **target: Any,
) -> DSparkInference:
    """Loads a bundle whose graphs' outputs are tampered with; ``target`` replaces fields of the manifest's target."""
    opened = Bundle.open(bundle)
    manifest = opened.manifest.model_copy(update={"target": opened.manifest.target.model_copy(update=target)})
    sessions = tampered_sessions(opened, tamper)
    use = ServingOptions(options or whole_drafts(opened), batch_size, settings=settings)
    return DSparkInference(LoadedModel(Bundle(bundle, manifest), sessions), use)


def tampered_sessions(bundle: Bundle, tamper: Tamper) -> dict[str, Session]:
    """A bundle's graphs, tampered with."""
    opened = open_sessions(bundle, HostOptions(threads=1), list(bundle.manifest.precision))
    return {name: _TamperedSession(name, session, tamper) for name, session in opened.items()}


def outcome(completion: Completion) -> tuple[Sequence[int], str | None, str, list[int], list[int]]:
    """What a request's neighbours, history and place in a batch must not change."""
    stats = completion.stats
    return (
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        stats.draft_lengths,
        stats.accepted_lengths,
    )


@dataclass
class _TamperedSession:
    name: str
    session: Session
    tamper: Tamper

    def bind(self, inputs: Arrays, outputs: Arrays) -> Call:
        return _TamperedCall(self.session.bind(inputs, outputs), partial(self._tamper, inputs, outputs))

    def _tamper(self, inputs: Arrays, outputs: Arrays) -> None:
        """What the target makes of its logits is made of those that were tampered with."""
        self.tamper(self.name, inputs, outputs)
        if CHOICES in outputs:
            with np.errstate(invalid="ignore"):
                outputs[LOGIT_SUMS][:] = outputs["logits"].sum(axis=1)
            outputs[CHOICES][:] = outputs["logits"].argmax(axis=1)


@dataclass
class _TamperedCall:
    call: Call
    tamper: Callable[[], None]

    def run(self) -> None:
        self.call.run()
        self.tamper()
