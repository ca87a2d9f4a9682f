"""``cost/<device>.json``: the tables that were measured for a bundle, and which one holds here.

A brief measurement has a file of its own beside it, ``<device>.brief.json``: it may be for more requests.
"""

import os
from pathlib import Path

from dspark.configs import DISTRIBUTION, own_version
from dspark.providers import Provider, Selection
from dspark.providers.errors import one_line
from dspark.providers.host import onnxruntime_version, processor
from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.calibration import confidence_files
from dspark.runtime.bundle.files import check_writable, write_whole
from dspark.runtime.bundle.versioned_file import read_versioned
from dspark.runtime.costs.table import COST_VERSION, CostKey, CostTable
from dspark.runtime.errors import BundleError, RequestError

__all__ = ["COST_FOLDER", "check_cost_folder", "cost_file", "cost_key", "read_costs", "write_costs"]

COST_FOLDER = "cost"


def cost_key(bundle: Bundle, provider: Provider | Selection, threads: int | None) -> CostKey:
    """What a table measured here and now would hold for.

    Args:
        bundle: The bundle.
        provider: What runs its graphs.
        threads: Host threads; None stands for one per core.
    """
    selection = provider if isinstance(provider, Selection) else Selection.of(provider)
    device = selection.device_name("target")
    return CostKey(
        device=processor() if device is None else f"{device}, {processor()}",
        provider=selection.label,
        threads=threads or os.cpu_count() or 1,
        precision={name: str(info) for name, info in bundle.manifest.precision.items()},
        files=confidence_files(bundle.manifest),
        versions={DISTRIBUTION: own_version(), "onnxruntime": onnxruntime_version()},
    )


def cost_file(bundle: Bundle, key: CostKey, *, brief: bool = False) -> Path:
    """Where the table of this key lies."""
    file = bundle.file(COST_FOLDER) / key.file_name
    return file.with_suffix(".brief.json") if brief else file


def read_costs(bundle: Bundle, key: CostKey, *, brief: bool = False) -> CostTable | None:
    """Reads a table that was measured on this device; None if there is none.

    Args:
        bundle: The bundle.
        key: What it has to hold for.
        brief: Whether it is the brief one.

    Raises:
        BundleError: The file is damaged, of another version, or holds for something else.
    """
    file = cost_file(bundle, key, brief=brief)
    table = read_versioned(file, CostTable, COST_VERSION)
    if table is None:
        return None
    here, there = _flat(key), _flat(table.key)
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            raise BundleError(f"{file}: was measured with {name} {there.get(name)}; here it is {here.get(name)}")
    return table


def write_costs(bundle: Bundle, table: CostTable, picture: bytes | None = None) -> Path:
    """Writes a table into the bundle, where it replaces one that was measured as thoroughly, and returns where.

    Args:
        bundle: The bundle.
        table: The table.
        picture: Shows it, as PNG; None removes that of the table it replaces.

    Raises:
        OSError: It cannot be written.
    """
    file = cost_file(bundle, table.key, brief=table.brief)
    file.parent.mkdir(exist_ok=True)
    write_whole(file, f"{table.model_dump_json(indent=2)}\n".encode())
    drawn = file.with_suffix(".png")
    if picture is None:
        drawn.unlink(missing_ok=True)
    else:
        write_whole(drawn, picture)
    return file


def check_cost_folder(bundle: Bundle) -> None:
    """Makes sure that a table can be written, before one is measured.

    Raises:
        RequestError: The folder of tables cannot be made or written.
    """
    folder = bundle.file(COST_FOLDER)
    try:
        check_writable(folder, ["table.json"])
    except OSError as error:
        raise RequestError(f"{folder}: cannot be written: {one_line(error)}; nothing was measured") from error


def _flat(key: CostKey) -> dict[str, str]:
    """The key's fields, those of its dictionaries one by one."""
    flat: dict[str, str] = {}
    for name, value in key:
        parts = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{name} {part}".strip(): str(each) for part, each in parts}
    return flat
