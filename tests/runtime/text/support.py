"""Conversations that several tests render."""

from tokenizers import Tokenizer

from dspark.runtime.text.tokenizer import TextProcessor
from tests.support.small_tokenizers import byte_level

__all__ = ["CHATML", "CHATTY", "chat"]

CHATML = """{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- "<|start|>" + message.role + "\\n" + message.content + "<|end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant\\n" }}{%- endif %}"""


def chat(template: str, messages: object, tokenizer: Tokenizer | None = None, **special_tokens: str) -> str:
    """The rendered conversation, read back from its ids with the special tokens."""
    tokenizer = tokenizer or byte_level()
    ids = TextProcessor(tokenizer.to_str(), template, special_tokens).encode_chat(messages)
    return tokenizer.decode(ids, skip_special_tokens=False)


CHATTY = {"role": "user", "content": "hi"}
