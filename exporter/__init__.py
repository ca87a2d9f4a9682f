"""Turns target models and drafters into bundles.

    from pathlib import Path
    from dspark.exporter import export_bundle, prepare

    export_bundle(prepare(Path("Qwen3-4B"), Path("dspark_qwen3_4b_block7"), Path("bundle")))

Nothing is written before ``prepare`` has accepted both checkpoints. Names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark.exporter.errors import CheckpointError, DSparkError, ExportError, ParityError
    from dspark.exporter.export import Export, Static, export_bundle, prepare
    from dspark.exporter.precision import Precision, PrecisionProfile

__all__ = [
    "CheckpointError",
    "DSparkError",
    "Export",
    "ExportError",
    "ParityError",
    "Precision",
    "PrecisionProfile",
    "Static",
    "export_bundle",
    "prepare",
]

_MODULES = {
    **dict.fromkeys(("Export", "Static", "export_bundle", "prepare"), "export"),
    **dict.fromkeys(("Precision", "PrecisionProfile"), "precision"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
