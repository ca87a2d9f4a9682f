"""Files of prompts that a bundle is measured with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dspark.runtime.decoding.sampling_params import SamplingParams
from dspark.runtime.engine.request import Request
from dspark.runtime.errors import RequestError
from dspark.runtime.inference import DSparkInference
from dspark.runtime.rows import parse_row, read_rows

__all__ = ["Dataset", "read_datasets"]


@dataclass(frozen=True)
class Dataset:
    """Prompts under one name.

    Attributes:
        name: The file's name without its ending.
        rows: As ``dspark-run generate`` takes them.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]

    def batches(
        self, inference: DSparkInference, params: SamplingParams, size: int, first_seed: int
    ) -> Iterator[list[Request]]:
        """Makes requests of the rows, ``size`` at a time.

        Args:
            inference: Will run them.
            params: Options that a row does not override.
            size: Requests of a batch.
            first_seed: Seed of the first row; each row has the next one.

        Raises:
            RequestError: A row is refused.
        """
        for start in range(0, len(self.rows), size):
            yield [
                self._request(inference, params.model_copy(update={"seed": first_seed + index}), index)
                for index in range(start, min(start + size, len(self.rows)))
            ]

    def check(self, inference: DSparkInference, params: SamplingParams) -> None:
        """Makes sure that no row will be refused half-way.

        Raises:
            RequestError: A row is refused.
        """
        for index in range(len(self.rows)):
            self._request(inference, params, index)

    def _request(self, inference: DSparkInference, params: SamplingParams, index: int) -> Request:
        try:
            return parse_row(inference, self.rows[index], params, raw=False)
        except RequestError as error:
            raise RequestError(f"{self.name}, row {index}: {error}") from error


def read_datasets(files: Sequence[Path], samples: int | None) -> list[Dataset]:
    """Reads JSONL files, one dataset per file.

    Args:
        files: The files.
        samples: Rows taken of each, the first ones; None takes all.

    Raises:
        RequestError: A file cannot be read, is empty, has a malformed row, or two have the same name.
    """
    if not files:
        raise RequestError("give at least one file of prompts with --input")
    if samples is not None and samples < 1:
        raise RequestError(f"samples is {samples}; it must be at least 1")
    datasets: dict[str, Dataset] = {}
    for file in files:
        if file.stem in datasets:
            raise RequestError(f"{file}: there is another file named {file.stem!r}; a file's name is its dataset's")
        datasets[file.stem] = Dataset(file.stem, list(_rows(file, samples)))
    return list(datasets.values())


def _rows(file: Path, samples: int | None) -> Iterator[Mapping[str, Any]]:
    empty = True
    try:
        with file.open("rb") as lines:
            for row in islice(read_rows(lines), samples):
                if isinstance(row, RequestError):
                    raise RequestError(f"{file}: {row}") from row
                empty = False
                yield row
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error}") from error
    if empty:
        raise RequestError(f"{file}: has no rows")
