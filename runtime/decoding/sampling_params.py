"""What a request may ask of sampling, and how a wrong wish is told."""

import difflib
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from dspark.runtime.bundle.contract import GREEDY_TEMPERATURE
from dspark.runtime.errors import RequestError

__all__ = ["SamplingParams"]


def _as_tuple(stop: object) -> object:
    if isinstance(stop, str):
        return (stop,)
    return tuple(stop) if isinstance(stop, list) else stop


Penalty = Annotated[float, Field(ge=-1e3, le=1e3)]


class SamplingParams(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False):
    """The sampling options of one request.

    They shape the target's distribution p in this order: logit bias, penalties, temperature, top-k, top-p, min-p
    (the order of Hugging Face transformers). The draft distribution q is shaped by the temperature alone.

    Attributes:
        max_new_tokens: Tokens to generate at most.
        temperature: Divides the logits; below 1e-5 decoding is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens that holds this mass.
        min_p: Keep tokens at least this fraction as likely as the likeliest.
        repetition_penalty: Divides positive and multiplies negative logits of every token in prompt or output
            (CTRL, arXiv:1909.05858; the rule of Hugging Face transformers).
        presence_penalty: Subtracted from the logits of tokens generated before (the rule of the OpenAI API).
        frequency_penalty: Subtracted from a logit once for each time its token was generated.
        logit_bias: Token id → value added to its logit.
        stop: Strings that end the text; a single string is accepted.
        seed: Fixes every draw of the request; None draws a new one.
    """

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    # JSON writes the ids of a mapping as strings.
    logit_bias: dict[Annotated[int, Field(ge=0, strict=False)], float] = {}
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)] = ()
    seed: Annotated[int, Field(ge=0)] | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @classmethod
    def parse(cls, base: Self, overrides: Mapping[str, Any]) -> Self:
        """Returns ``base`` with some options replaced by values from outside.

        Args:
            base: Options that are kept where ``overrides`` says nothing.
            overrides: Option name → value, such as the keys of a JSON row.

        Raises:
            RequestError: An option does not exist or its value is not allowed; names each of them.
        """
        try:
            return cls.model_validate(dict(base) | dict(overrides))
        except ValidationError as error:
            raise RequestError("; ".join(map(_explain, error.errors(include_url=False)))) from error


def _explain(problem: Mapping[str, Any]) -> str:
    """Says one pydantic error in terms of the option."""
    name = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    if problem["type"] == "extra_forbidden":
        options = list(SamplingParams.model_fields)
        near = difflib.get_close_matches(name, options, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(options)}"
        return f"unknown sampling option {name!r}; {advice}"
    rule = problem["msg"].removeprefix("Input ").replace("should be", "must be")
    return f"sampling option {name} = {reprlib.repr(problem['input'])}: {rule[0].lower()}{rule[1:]}"
