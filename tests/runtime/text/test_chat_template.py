"""Chat templates render as their models expect, or refuse."""

import json
import subprocess
import sys

import pytest

from dspark.runtime.errors import BundleError, RequestError
from dspark.runtime.text.tokenizer import TextProcessor
from tests.runtime.text.support import CHATML, CHATTY, chat
from tests.support.small_tokenizers import GOLDEN, PROCESSORS, byte_fallback, byte_level


def test_a_conversation_ends_where_the_answer_begins():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the fox?"}]
    expected = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nthe fox?<|end|>\n<|start|>assistant\n"
    assert chat(CHATML, messages) == expected
    ids = TextProcessor(byte_level().to_str(), CHATML).encode_chat(messages)
    assert (ids.count(0), ids.count(1)) == (2, 3)


def test_the_beginning_of_text_is_written_once():
    template = "{{ bos_token }}{{ messages[0].content }}"
    processor = TextProcessor(byte_fallback(strip=True).to_str(), template, {"bos_token": "<s>"})
    assert processor.encode_chat([{"role": "user", "content": "a"}]).count(1) == 1
    processor = TextProcessor(byte_fallback(strip=True).to_str(), "{{ messages[0].content }}")
    assert processor.encode_chat([{"role": "user", "content": "a"}]).count(1) == 0


def test_templates_find_what_they_are_written_for():
    template = """
    {%- for message in messages -%}
        {%- if loop.index > 1 %}{% break %}{% endif -%}
        {{ message | tojson }}|{{ message | tojson(indent=1) | length }}|{{ strftime_now("%Y") | length }}
        {%- if tools is not none or documents is not none %}|tools{% endif %}
        {%- if missing is defined %}|missing{% endif %}
        {%- generation %}|{{ message.role }}{% endgeneration %}
    {%- endfor %}
"""
    message = {"role": "user", "content": "<é>"}
    length = len(json.dumps(message, indent=1, ensure_ascii=False))
    assert chat(template, [message, message]) == f'{{"role": "user", "content": "<é>"}}|{length}|4|user'


def test_blocks_are_trimmed():
    assert chat("{% if true %}\n    {% if true %}\nx\n    {% endif %}\n{% endif %}\n", [CHATTY]) == "x\n"


@pytest.mark.parametrize(
    "template",
    [CHATML, "{{ bos_token }}{% for m in messages %}\n  {{ m | tojson }}\n{% endfor %}\n{{ tools is none }}"],
)
def test_rendering_equals_transformers(template):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [CHATTY, {"role": "assistant", "content": "\"hello\" 'é' <b>\n"}, CHATTY]
    (expected,), _ = utils.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<|start|>"
    )
    assert chat(template, messages, bos_token="<|start|>") == expected


TOOLS = """{%- for message in messages %}
    {%- if message.content is none %}null {% endif %}
    {%- for call in message.tool_calls or [] -%}
        {{ call.function.name }}({{ call.function.arguments | tojson }})
    {%- endfor %}
    {%- if message.role == "tool" %}{{ message.tool_call_id }}={{ message.content }}{% endif %}
{%- endfor %}"""


def test_tool_calls_are_up_to_the_template():
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    answer = {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
    for message in (
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": calls},
    ):
        assert chat(TOOLS, [CHATTY, message, answer]) == 'null add({"a": 1})c1=2'
    with pytest.raises(RequestError, match="the chat template refuses the messages"):
        chat(CHATML, [{"role": "assistant", "content": None, "tool_calls": calls}])


def test_tojson_takes_its_arguments_by_position():
    message = {"b": "é", "a": 1}
    template = "{{ messages[0].tool_calls[0] | tojson(true, 1, (',', ':'), true) }}"
    expected = json.dumps(message, ensure_ascii=True, indent=1, separators=(",", ":"), sort_keys=True)
    assert chat(template, [CHATTY | {"tool_calls": [message]}]) == expected


def test_what_a_template_says_can_always_be_written():
    template = "{{ raise_exception('unknown\n role ' + messages[0].role) }}"
    with pytest.raises(RequestError) as caught:
        chat(template, [{"role": "\ud800", "content": "x"}])
    assert str(caught.value) == "the chat template refuses the messages: unknown role \\ud800"
    assert str(caught.value).encode()


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content + 1 }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}{{ x.y }}"]
)
def test_a_template_that_fails_is_a_refusal(template):
    with pytest.raises(RequestError, match="chat template refuses"):
        chat(template, [CHATTY])


def test_a_template_that_is_no_template_is_refused():
    with pytest.raises(BundleError, match="line 2 of the chat template is not valid Jinja"):
        chat("a\n{% for %}", [CHATTY])


def test_without_a_template_there_is_no_chat():
    assert not PROCESSORS["characters"].has_chat_template
    assert TextProcessor(byte_level().to_str(), CHATML).has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        PROCESSORS["characters"].encode_chat([CHATTY])


def test_jinja_is_imported_by_the_first_conversation_only():
    code = """
import sys
from dspark.runtime.text.tokenizer import TextProcessor
from dspark.runtime.text.stream import TextStream
processor = TextProcessor(sys.stdin.read(), "{{ messages[0].content }}")
TextStream(processor).push(processor.encode("hi"))
assert "jinja2" not in sys.modules
processor.encode_chat([{"role": "user", "content": "hi"}])
assert "jinja2" in sys.modules
"""
    tokenizer = (GOLDEN / "qwen3_target" / "tokenizer.json").read_text(encoding="utf-8")
    subprocess.run([sys.executable, "-c", code], input=tokenizer, encoding="utf-8", check=True)
