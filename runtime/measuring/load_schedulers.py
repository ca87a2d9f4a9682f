"""The schedulers that a load benchmark compares, such as ``off``, ``fixed:3`` and ``threshold:0.5``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.errors import RequestError
from dspark.runtime.scheduling.options import SchedulerName, SpeculationOptions

__all__ = ["named_schedulers"]


def named_schedulers(
    manifest: Manifest, options: SpeculationOptions, names: Sequence[str] | None
) -> dict[str, SpeculationOptions]:
    """The schedulers' options by name; those named must fit the bundle, by default all that fit are taken."""
    if names is None:
        names = [name for name in get_args(SchedulerName) if _fits(name, manifest)]
    if manifest.drafter is None or set(names) == {"off"}:
        replace(options, scheduler="off").resolve(manifest)  # nothing would follow what else is given
    if options.confidence_threshold is not None and "threshold" not in names:
        raise RequestError(
            f"confidence_threshold belongs to scheduler 'threshold', which is not among {', '.join(names)}"
        )
    chosen = {name: _options(name, options) for name in names}
    for each in chosen.values():
        each.resolve(manifest)
    return chosen


def _fits(name: SchedulerName, manifest: Manifest) -> bool:
    """Whether the bundle has what a scheduler needs."""
    try:
        SpeculationOptions(name).resolve(manifest)
    except RequestError:
        return False
    return True


def _options(text: str, options: SpeculationOptions) -> SpeculationOptions:
    """The options of a scheduler such as ``off``, ``fixed:3`` or ``threshold:0.5``."""
    name, colon, value = text.partition(":")
    known: dict[str, SchedulerName] = {each: each for each in get_args(SchedulerName)}
    if name not in known:
        raise RequestError(f"scheduler is {name!r}; there are {', '.join(known)}")
    chosen = replace(
        options,
        scheduler=known[name],
        max_draft_tokens=None if name == "off" else options.max_draft_tokens,
        confidence_threshold=options.confidence_threshold if name == "threshold" else None,
    )
    if not colon:
        return chosen
    try:
        if name == "fixed":
            return replace(chosen, max_draft_tokens=int(value))
        if name == "threshold":
            return replace(chosen, confidence_threshold=float(value))
    except ValueError as error:
        raise RequestError(f"scheduler is {text!r}; after the colon there must be a number") from error
    raise RequestError(
        f"scheduler is {text!r}; only fixed and threshold take a number, as in fixed:3 and threshold:0.5"
    )
