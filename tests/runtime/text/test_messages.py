"""Messages of a conversation: what is refused, and parts that are joined."""

import pytest

from dspark.runtime.errors import RequestError
from tests.runtime.text.support import CHATML, CHATTY, chat


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (CHATTY, "non-empty list"),
        (None, "non-empty list"),
        (["hi"], "message 0 must have the keys 'role' and 'content', not 'hi'"),
        ([CHATTY, {"role": "user"}], r"message 1 must have the keys 'role' and 'content', not the keys \['role'\]"),
        ([CHATTY | {"contnet": "x"}], "message 0 must have the keys"),
        ([{"role": "user", "content": None}], "the content of message 0 must be a string, not None"),
        ([{"role": "user", "content": None, "tool_calls": []}], "the content of message 0 must be a string, not None"),
        ([{"role": "user", "content": 5, "tool_calls": [{}]}], "the content of message 0 must be a string, not 5"),
        ([CHATTY | {"tool_calls": "f"}], "the tool_calls of message 0 must be a list of objects, not 'f'"),
        ([CHATTY | {"tool_call_id": 5}], "the tool_call_id of message 0 must be a string, not 5"),
        ([{"role": 1, "content": "x"}], "the role of message 0 must be a string, not 1"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
            "part 1 of the content of message 0 is of type 'image_url'; only text parts are supported",
        ),
        ([{"role": "user", "content": ["x"]}], "part 0 of the content of message 0 is 'x'; only text parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], "the text of part 0 .* must be a string, not None"),
        ([{"role": "robot", "content": "x"}], "the chat template refuses the messages: unknown role robot"),
    ],
)
def test_bad_messages_are_refused(messages, message):
    with pytest.raises(RequestError, match=message):
        chat(CHATML, messages)


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "the fox"}, {"type": "text", "text": "sleeps"}]
    assert chat(CHATML, [{"role": "user", "content": parts}]) == chat(
        CHATML, [{"role": "user", "content": "the fox sleeps"}]
    )
    assert chat("{{ messages[0].content }}.", [{"role": "user", "content": []}]) == "."
