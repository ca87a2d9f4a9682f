"""A bundle as ``generate`` and ``chat`` load it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from dspark.runtime.commands.terminal import messages
from dspark.runtime.reports.lines import notices

if TYPE_CHECKING:
    from dspark.runtime.inference import DSparkInference
    from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["load"]


def load(
    bundle: Path,
    options: "SpeculationOptions",
    *,
    batch_size: int | None,
    threads: int | None,
    profile: str | None,
    provider: Sequence[str] | None,
    allow_fallback: bool,
) -> "DSparkInference":
    """Loads a bundle for one thread that submits and computes, and tells what takes longer; see its own ``load``."""
    from dspark.runtime.inference import DSparkInference

    with messages.status(Text(f"Loading {bundle}")):
        return DSparkInference.load(
            bundle,
            options=options,
            batch_size=batch_size,
            threads=threads,
            profile=profile,
            notify=notices(messages),
            provider=provider or "cpu",
            allow_fallback=allow_fallback,
            shared=False,
        )
