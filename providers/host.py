"""What host this is, as far as measurements depend on it."""

import os
import platform
import re
from pathlib import Path

from dspark.providers.onnxruntime.library import import_onnxruntime

__all__ = ["onnxruntime_version", "processor"]


def processor() -> str:
    """The processor's name and its cores; Linux knows the name, elsewhere it may be the architecture only."""
    information = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)$", information.read_text(), re.M) if information.exists() else None
    name = named[1].strip() if named else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def onnxruntime_version() -> str:
    """The version of the installed build of ONNX Runtime.

    Raises:
        ProviderError: None is installed.
    """
    return str(import_onnxruntime().__version__)
