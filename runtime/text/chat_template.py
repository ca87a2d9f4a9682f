"""Chat templates as Hugging Face models ship them (``chat_template.jinja``)."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark.runtime.errors import BundleError, RequestError

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A conversation's way into one prompt.

    The environment is the one that templates are written for: blocks trimmed, loop controls, ``raise_exception``,
    ``strftime_now`` and a ``tojson`` that keeps Unicode (Hugging Face transformers, "Chat templates"). Templates are
    foreign code: they run in Jinja's immutable sandbox.

    Args:
        source: The template.
        special_tokens: Variables such as ``bos_token``.

    Raises:
        BundleError: The template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BundleError(
                f"line {error.lineno} of the chat template is not valid Jinja: {error.message}"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Writes the conversation and the beginning of the assistant's answer.

        Raises:
            RequestError: The template refuses the messages, or fails on them.
        """
        try:
            # Templates compare ``tools`` and ``documents`` with none, which an undefined variable is not.
            return self._template.render(
                self._special_tokens, messages=messages, tools=None, documents=None, add_generation_prompt=True
            )
        except Exception as error:  # a template can fail in every way that Python can
            raise RequestError(f"the chat template refuses the messages: {error}") from error


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's tokens for training; its body is written as is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(value: Any, **layout: Any) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | layout))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
