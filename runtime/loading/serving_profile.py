"""Serving profiles: how a loaded bundle takes requests in and speculates, as a YAML file says it.

There are two forms. The full one has the sections ``verification`` and ``scheduling``; the short one three numbers.
Every key may be left out.
"""

import difflib
import math
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from dspark.configs import serving_profiles
from dspark.providers.errors import one_line
from dspark.runtime.arguments import check_argument
from dspark.runtime.bundle.manifest import Manifest
from dspark.runtime.engine.settings import EngineSettings
from dspark.runtime.errors import RequestError
from dspark.runtime.scheduling.options import SpeculationOptions

__all__ = ["FullProfile", "ServingProfile", "ShortProfile", "find_profile"]

LONGEST_DELAY = 10.0
UNITS = {"ms": 1e-3, "s": 1.0}


def _seconds(value: object) -> object:
    """Seconds of a text such as ``50ms`` or ``1.5s``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", value) if isinstance(value, str) else None
    seconds = float(found[1]) * UNITS[found[2]] if found else math.inf
    if seconds > LONGEST_DELAY:
        raise ValueError(f"must be a duration such as 50ms or 1s, from 0ms to {LONGEST_DELAY:g}s")
    return seconds


Duration = Annotated[float, BeforeValidator(_seconds)]


class _Section(BaseModel):
    """Part of a profile."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Verification(_Section):
    """What a verification step checks.

    Attributes:
        max_step_tokens: Tokens that a step carries at most, see ``EngineSettings.step_tokens``; None: any number. Also
            read as ``batch_size``.
        confidence_threshold: Draft tokens are verified up to the first less sure than this, if the bundle has a
            confidence head; None: the default scheduler decides.
        max_candidates: Draft tokens of a request verified a step at most, all that there are if the drafter proposes
            fewer; None: all.
    """

    max_step_tokens: int | None = Field(default=None, ge=1, le=4096)
    confidence_threshold: float | None = Field(default=None, ge=0, le=1)
    max_candidates: int | None = Field(default=None, ge=1, le=64)

    @model_validator(mode="before")
    @classmethod
    def _former_name(cls, given: Any) -> Any:
        """Reads ``batch_size``, which counts tokens here and requests elsewhere, as ``max_step_tokens``."""
        if not isinstance(given, Mapping) or "batch_size" not in given:
            return given
        if "max_step_tokens" in given:
            raise ValueError("batch_size: is the former name of max_step_tokens, which is there, too; give one of them")
        return {("max_step_tokens" if key == "batch_size" else key): value for key, value in given.items()}


class Scheduling(_Section):
    """How requests are taken in.

    Attributes:
        dynamic_batching: Whether an idle engine waits for a batch; if not, the next two have no effect.
        min_batch_size: Requests that it waits for.
        max_queue_delay: Time that it waits for them at most, from when the oldest came.
        max_batch_size: Requests that run at once.
        prefill_tokens: Prompt tokens a step computes at most, while running requests wait.
        max_cache_tokens: See ``EngineSettings.cache_tokens``; None: any number.
    """

    dynamic_batching: bool = True
    min_batch_size: int = Field(default=1, ge=1, le=256)
    max_queue_delay: Duration = 0.0
    max_batch_size: int = Field(default=16, ge=16, le=256)
    prefill_tokens: int = Field(default=128, ge=16, le=8192)
    max_cache_tokens: int | None = Field(default=None, ge=16, le=1 << 30)

    @model_validator(mode="after")
    def _check_order(self) -> "Scheduling":
        if self.min_batch_size > self.max_batch_size:
            raise ValueError(
                f"min_batch_size = {self.min_batch_size}: must be at most max_batch_size, {self.max_batch_size}"
            )
        return self


class ServingProfile(_Section, ABC):
    """A profile of either form."""

    _name: str = PrivateAttr("")

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """Requests that run at once; None leaves it open."""

    @property
    @abstractmethod
    def settings(self) -> EngineSettings:
        """How the engine takes requests in."""

    @property
    def max_sequence_length(self) -> int | None:
        """Longest text in tokens; None takes the model's own limit."""
        return None

    def context_length(self, limit: int, given: int | None = None) -> int:
        """Longest text in tokens: what is given, else the profile's, else all that is possible.

        Args:
            limit: What a bundle allows.
            given: Goes before the profile's.

        Raises:
            RequestError: The bundle does not allow it.
        """
        name = "max_sequence_length"
        if given is None and self.max_sequence_length is not None:
            name, given = f"profile {self._name}: max_sequence_len", self.max_sequence_length
        if given is not None and (type(given) is not int or not 2 <= given <= limit):
            raise RequestError(f"{name} is {given!r}; this bundle allows 2 to {limit}")
        return limit if given is None else given

    @abstractmethod
    def options(self, manifest: Manifest, given: SpeculationOptions) -> SpeculationOptions:
        """How a bundle speculates.

        Args:
            manifest: The bundle's manifest.
            given: Options that go before the profile's.
        """


class FullProfile(ServingProfile):
    """The full form."""

    verification: Verification = Verification()
    scheduling: Scheduling = Scheduling()

    @property
    def batch_size(self) -> int:
        """``max_batch_size``."""
        return self.scheduling.max_batch_size

    @property
    def settings(self) -> EngineSettings:
        """How the engine takes requests in."""
        scheduling = self.scheduling
        settings = EngineSettings(
            prefill_tokens=scheduling.prefill_tokens,
            step_tokens=self.verification.max_step_tokens,
            cache_tokens=scheduling.max_cache_tokens,
        )
        if not scheduling.dynamic_batching:
            return settings
        return replace(settings, min_batch_size=scheduling.min_batch_size, max_queue_delay=scheduling.max_queue_delay)

    def options(self, manifest: Manifest, given: SpeculationOptions) -> SpeculationOptions:
        """``max_candidates`` and ``confidence_threshold``, where the bundle and the given options allow them."""
        threshold, candidates = self.verification.confidence_threshold, self.verification.max_candidates
        length_open = given.max_draft_tokens is None and given.scheduler != "off"
        if manifest.drafter is not None and candidates is not None and length_open:
            given = replace(given, max_draft_tokens=min(candidates, manifest.drafter.draft_length))
        if manifest.has_confidence and given.confidence_threshold is None and given.scheduler in (None, "threshold"):
            given = replace(given, confidence_threshold=threshold)
        return given


class ShortProfile(ServingProfile):
    """The short form.

    Attributes:
        draft_ratio: Share of every draft that is verified, rounded up to whole tokens; 0 decodes plainly, whatever the
            scheduler. None: all.
        validation_batch: Tokens that a verification step carries at most, as ``verification.max_step_tokens``; None:
            any number.
        max_sequence_len: Longest text in tokens, prompt and output together; None: the model's own limit.
    """

    draft_ratio: float | None = Field(default=None, ge=0, le=1)
    validation_batch: int | None = Field(default=None, ge=1, le=4096)
    max_sequence_len: int | None = Field(default=None, ge=2, le=1 << 30)

    @property
    def batch_size(self) -> None:
        """Left open."""
        return None

    @property
    def settings(self) -> EngineSettings:
        """How the engine takes requests in."""
        return EngineSettings(step_tokens=self.validation_batch)

    @property
    def max_sequence_length(self) -> int | None:
        """``max_sequence_len``."""
        return self.max_sequence_len

    def options(self, manifest: Manifest, given: SpeculationOptions) -> SpeculationOptions:
        """``draft_ratio`` in tokens, if the given options leave it open; no tokens are no scheduler's business."""
        length_open = given.max_draft_tokens is None and given.scheduler != "off"
        if manifest.drafter is None or self.draft_ratio is None or not length_open:
            return given
        tokens = math.ceil(round(self.draft_ratio * manifest.drafter.draft_length, 6))  # 0.7 · 10 is a little above 7
        return replace(given, max_draft_tokens=tokens) if tokens else SpeculationOptions("off")


SECTIONS: dict[str, type[_Section]] = {"verification": Verification, "scheduling": Scheduling}
KEYS: dict[str, FieldInfo] = {
    **{f"{section}.{key}": field for section, model in SECTIONS.items() for key, field in model.model_fields.items()},
    **ShortProfile.model_fields,
}
"""Every key of both forms."""


def find_profile(name: Path | str | None) -> ServingProfile:
    """Reads a serving profile.

    Args:
        name: Of one that comes with the package, or a YAML file; None stands for one that binds nothing.

    Raises:
        RequestError: There is none, it cannot be read, or a key or value is wrong.
    """
    if name is None:
        return ShortProfile()
    check_argument("profile", name, (str, Path), f"the name of a profile ({', '.join(serving_profiles())}) or a file")
    import yaml  # only profiles need it

    shipped, path = serving_profiles(), Path(name)
    if str(name) in shipped:
        text = shipped[str(name)]
    elif path.suffix not in (".yaml", ".yml"):
        raise RequestError(f"there is no profile {str(name)!r}, and no .yaml file; {_advice(str(name), shipped)}")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"profile {path}: cannot be read: {error}") from error
    try:
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader))
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # PyYAML lets all of them through
        raise RequestError(f"profile {name}: is not YAML: {one_line(error)}") from error
    if content is None:  # an empty file
        content = {}
    if not isinstance(content, dict):
        raise RequestError(f"profile {name}: must be keys with values, not {reprlib.repr(content)}")
    return _parse(name, content)


def _refuse_repeated_keys(node: Any) -> None:
    """PyYAML would take the last of them.

    Raises:
        ValueError: A key of a mapping stands there twice.
    """
    keys = [key.value for key, _ in node.value] if getattr(node, "id", None) == "mapping" else []
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} stands there twice")
    for _, value in node.value if keys else []:
        _refuse_repeated_keys(value)


def _parse(name: Path | str, content: dict[Any, Any]) -> ServingProfile:
    full, short = FullProfile.model_fields, ShortProfile.model_fields
    form = ShortProfile if content.keys() & short.keys() else FullProfile
    if form is ShortProfile and content.keys() & full.keys():
        raise RequestError(
            f"profile {name}: has {', '.join(map(str, content))}; use {' and '.join(full)}, or {', '.join(short)}"
        )
    try:
        profile = form.model_validate(content)
        profile._name = str(name)
        return profile
    except ValidationError as error:
        problems = (_explain(problem) for problem in error.errors(include_url=False))
        raise RequestError(f"profile {name}: {'; '.join(problems)}") from error


def _explain(problem: Mapping[str, Any]) -> str:
    """Says one pydantic error in terms of the profile."""
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        return f"unknown key {place!r}; {_advice(place, [*SECTIONS, *KEYS])}"
    if place in SECTIONS:
        if problem["type"] == "value_error":
            return f"{place}.{problem['ctx']['error']}"
        rule = f"must be keys with values: {', '.join(SECTIONS[place].model_fields)}"
    elif problem["type"] == "value_error":
        rule = str(problem["ctx"]["error"])
    else:
        rule = f"must be {_allowed(KEYS[place])}"
    return f"{place} = {reprlib.repr(problem['input'])}: {rule}"


def _allowed(field: FieldInfo) -> str:
    kind = next(kind for kind in (bool, int, float) if kind in (field.annotation, *get_args(field.annotation)))
    if kind is bool:
        return "true or false"
    limits = {name: value for limit in field.metadata for name, value in asdict(limit).items()}
    return f"a {'whole ' if kind is int else ''}number from {limits['ge']} to {limits['le']}"


def _advice(name: str, known: Iterable[str]) -> str:
    """What might have been meant: the last parts of dotted names count most."""
    places = {place.rpartition(".")[2]: place for place in known}
    near = difflib.get_close_matches(name.rpartition(".")[2], places, n=1)
    return f"did you mean {places[near[0]]!r}?" if near else f"there are: {', '.join(places.values())}"
