"""``dspark-run chat``, read from a pipe."""

import re
from pathlib import Path

import pytest

from dspark.runtime.engine.engine import Engine
from tests.runtime.commands.support import GoldenBundle, expected
from tests.support.command_line import Run


def test_a_conversation_from_a_pipe(run: Run, chat_bundle: GoldenBundle) -> None:
    bundle = chat_bundle("eagle3")
    turns = ["what is a class", "and a string"]
    messages: list[dict[str, str]] = [{"role": "system", "content": "short"}]
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text, _ = expected(bundle, messages, max_new_tokens=20)  # type: ignore[arg-type]
        messages.append({"role": "assistant", "content": str(text)})
        answers.append(text)
    arguments = ["chat", bundle, "--system", "short", "--max-new-tokens", "20"]
    for ending in ("", "/exit\nnever read\n"):
        result = run(*arguments, stdin=f"{turns[0]}\n\n  {turns[1]}\n{ending}")
        assert (result.code, result.error) == (0, "")
        assert re.sub(r"(?m)^(> )+", "", result.out).split("\n")[:2] == answers
        assert "never" not in result.out


def test_a_refused_message_does_not_end_the_chat(run: Run, chat_bundle: GoldenBundle) -> None:
    stdin = "refuse me\nwhat is a class\n"
    result = run("chat", chat_bundle("dspark_vanilla"), "--max-new-tokens", "20", stdin=stdin)
    text, _ = expected(chat_bundle("dspark_vanilla"), "what is a class", max_new_tokens=20)
    assert result.code == 0
    assert result.error == "error: the chat template refuses the messages: as you wish\n"
    assert text is not None
    assert text in result.out


def test_a_conversation_needs_a_template(run: Run, vanilla: Path) -> None:
    result = run("chat", vanilla, stdin="what is a class\n")
    assert (result.code, result.out.strip()) == (1, "")
    assert result.error == f"error: {vanilla}: has no chat template, which a conversation needs; use generate\n"


def test_ctrl_c_breaks_an_answer_off(run: Run, chat_bundle: GoldenBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = Engine.step, 0

    def interrupted(engine: Engine) -> object:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    bundle = chat_bundle("dspark_vanilla")
    stdin = "what is a class\nand a string\n"
    result = run("chat", bundle, "--max-new-tokens", "20", stdin=stdin)
    assert result.code == 0
    first, second, *_ = result.out.split("\n")
    part = first.removeprefix("> ").removesuffix(" …")
    assert 0 < len(part) < 20
    monkeypatch.undo()
    messages = [
        {"role": "user", "content": "what is a class"},
        {"role": "assistant", "content": part},
        {"role": "user", "content": "and a string"},
    ]
    assert second.removeprefix("> ") == expected(bundle, messages, max_new_tokens=20)[0]  # type: ignore[arg-type]
