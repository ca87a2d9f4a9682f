"""The form of chat messages."""

from collections.abc import Mapping
from typing import Any

from dspark.runtime.errors import RequestError

__all__ = ["plain_messages"]

OPTIONAL_TEXTS = {"name", "tool_call_id"}
KEYS = {"role", "content", "tool_calls"} | OPTIONAL_TEXTS


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as the templates of text models expect them.

    Content given as a list of text parts is joined with spaces, as transformers' server does. Beside ``tool_calls``
    content may be null or missing; the template decides about that and about the calls.

    Raises:
        RequestError: This is no conversation; names the message and its part.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(f"messages must be a non-empty list, not {messages!r}")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"message {index} must have the keys 'role' and 'content', not {message!r}")
    calls = message.get("tool_calls")
    needed = {"role"} if calls else {"role", "content"}
    if not needed <= set(message) <= KEYS:
        given = sorted(map(str, message))
        raise RequestError(f"message {index} must have the keys 'role' and 'content', not the keys {given}")
    if calls is not None and not (isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)):
        raise RequestError(f"the tool_calls of message {index} must be a list of objects, not {calls!r}")
    for key in ("role", *sorted(OPTIONAL_TEXTS & set(message))):
        if not isinstance(message[key], str):
            raise RequestError(f"the {key} of message {index} must be a string, not {message[key]!r}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = " ".join(_text_of(index, number, part) for number, part in enumerate(content))
    if not isinstance(content, str) and not (content is None and calls):
        raise RequestError(f"the content of message {index} must be a string, not {content!r}")
    return {**message, "content": content}


def _text_of(index: int, number: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        what = repr(part) if kind is None else f"of type {kind!r}"
        raise RequestError(f"part {number} of the content of message {index} is {what}; only text parts are supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(
            f"the text of part {number} of the content of message {index} must be a string, not {text!r}"
        )
    return text
