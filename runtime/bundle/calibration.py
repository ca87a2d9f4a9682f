"""``calibration.json``: temperatures that turn a bundle's confidence logits into honest probabilities."""

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dspark.runtime.bundle.bundle import Bundle
from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.bundle.versioned_file import read_versioned
from dspark.runtime.errors import BundleError

__all__ = ["CALIBRATION", "Calibration", "confidence_files", "confidences", "read_calibration"]

CALIBRATION = "calibration.json"
CALIBRATION_VERSION = 1
ADVICE = "calibrate again with dspark-run calibrate, or delete the file"

Share = Annotated[float, Field(ge=0, le=1)]


class Calibration(BaseModel):
    """What ``dspark-run calibrate`` found.

    Attributes:
        temperatures: What the confidence logit of each draft position is divided by (γ values).
        rounds: Drafts that they were fitted to.
        sampling_temperatures: Temperatures that these were generated with.
        survival_ece_before: Expected calibration error of the survival probability at each position without the
            temperatures; None for a position that was never observed.
        survival_ece_after: The same with the temperatures, on the same rounds.
        files: SHA-256 of the files that confidences depend on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = 1
    temperatures: tuple[Annotated[float, Field(gt=0)], ...]
    rounds: int = Field(ge=1)
    sampling_temperatures: tuple[Annotated[float, Field(ge=0)], ...]
    survival_ece_before: tuple[Share | None, ...]
    survival_ece_after: tuple[Share | None, ...]
    files: dict[str, str]

    @property
    def mean_survival_ece(self) -> tuple[float, float]:
        """Before and after, averaged over the observed positions."""
        before, after = (
            fmean([error for error in errors if error is not None] or [0.0])
            for errors in (self.survival_ece_before, self.survival_ece_after)
        )
        return before, after


def confidences(logits: NDArray[Any], temperatures: NDArray[Any] | float) -> NDArray[Any]:
    """The probability that a draft token survives if all before it did, σ(z / t), of the logits' type and shape."""
    scaled = logits / np.asarray(temperatures, logits.dtype)
    return np.asarray(np.exp(-np.logaddexp(0, -scaled)))  # the logistic function, without overflow


def confidence_files(manifest: Manifest) -> dict[str, str]:
    """SHA-256 of a bundle's files that confidences depend on: graphs, weights, draft vocabulary; not the text's."""
    text = {manifest.text.tokenizer, manifest.text.chat_template}
    return {name: info.sha256 for name, info in manifest.files.items() if name not in text}


def read_calibration(bundle: Bundle) -> Calibration | None:
    """Reads a bundle's calibration; None if it has none.

    Raises:
        BundleError: The file is damaged, of another version, or was made for another bundle.
    """
    file = bundle.file(CALIBRATION)
    calibration = read_versioned(file, Calibration, CALIBRATION_VERSION, f"; {ADVICE}")
    if calibration is not None:
        _check(file, calibration, bundle.manifest)
    return calibration


def _check(file: Path, calibration: Calibration, manifest: Manifest) -> None:
    """A calibration holds for the very files that it was measured with."""
    files = confidence_files(manifest)
    for name in sorted({*files, *calibration.files}):
        made_for, here = (hashes.get(name, "no such file") for hashes in (calibration.files, files))
        if made_for != here:
            raise BundleError(
                f"{file}: was made for another bundle, where {name} has SHA-256 {made_for}; here it is {here}; {ADVICE}"
            )
    positions = manifest.drafter.draft_length if manifest.drafter else 0
    for field in ("temperatures", "survival_ece_before", "survival_ece_after"):
        found = len(getattr(calibration, field))
        if found != positions:
            raise BundleError(f"{file}: {field} has {found} values; the drafter has {positions} positions; {ADVICE}")
