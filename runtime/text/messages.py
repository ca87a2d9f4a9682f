"""The form of chat messages."""

from collections.abc import Mapping

from dspark.runtime.errors import RequestError

__all__ = ["check_messages"]


def check_messages(messages: object) -> None:
    """Refuses what is no conversation.

    Raises:
        RequestError: Names the message and its part.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(f"messages must be a non-empty list, not {messages!r}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            given = f"the keys {sorted(map(str, message))}" if isinstance(message, Mapping) else repr(message)
            raise RequestError(f"message {index} must have the keys 'role' and 'content', not {given}")
        for key, value in message.items():
            if not isinstance(value, str):
                raise RequestError(f"the {key} of message {index} must be a string, not {value!r}")
