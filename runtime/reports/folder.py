"""A report's folder, tried before there is anything to write."""

from collections.abc import Sequence
from pathlib import Path

from dspark.providers.errors import one_line
from dspark.runtime.bundle.files import check_writable
from dspark.runtime.errors import RequestError
from dspark.runtime.reports.pictures import can_draw

__all__ = ["check_report"]


def check_report(folder: Path, names: Sequence[str]) -> None:
    """Makes sure that a report can be written.

    Args:
        folder: Where; made and removed again if it does not exist.
        names: The report's files.

    Raises:
        RequestError: matplotlib is missing, or the folder or one of the files cannot be written.
    """
    if not can_draw():
        raise RequestError("--report needs matplotlib: pip install 'dspark-onnx[report]'")
    try:
        check_writable(folder, names)
    except OSError as error:
        raise RequestError(f"--report {folder}: cannot be written: {one_line(error)}") from error
