"""Conversations that a target writes through the engine."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from generate_data import Conversations, Writer, main

from dspark.runtime import DSparkInference, RequestError, SamplingParams, SpeculationOptions
from dspark.runtime.engine.request import Request

PROMPTS = ["tead ", "in the", "the class", "a", "in a class", "tead the"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    return path


def test_conversations_are_what_the_target_says(
    chat_bundle: Callable[[str], Path], tmp_path: Path, prompts: Path
) -> None:
    bundle, output = chat_bundle("qwen3_target"), tmp_path / "data.npz"
    main(bundle, output, 6, [prompts], None, [0.0], 64, 4, 1)
    model = DSparkInference.load(bundle, options=SpeculationOptions("off"), threads=1)
    with np.load(output) as file:
        ids, mask = file["ids"], file["response_mask"]
        assert ids.shape == mask.shape == (6, 64)
        assert (ids.dtype, mask.dtype) == (np.uint16, np.uint8)
        assert file["temperature"].tolist() == [0.0] * 6
    starts = mask.argmax(axis=1)
    asked = [row[:start].tolist() for row, start in zip(ids, starts, strict=True)]
    assert sorted(asked) == sorted(model.encode(text) for text in PROMPTS)
    for row, spoken, start in zip(ids, mask, starts, strict=True):
        length = int(spoken.sum())
        assert spoken[start : start + length].all()
        completion = model.generate([row[:start].tolist()], SamplingParams(max_new_tokens=64 - int(start)))[0]
        assert completion.token_ids == row[start : start + length].tolist()


def test_a_run_goes_on_and_can_be_repeated(chat_bundle: Callable[[str], Path], tmp_path: Path, prompts: Path) -> None:
    bundle = chat_bundle("qwen3_target")
    one, other = tmp_path / "one.npz", tmp_path / "other.npz"
    for output in (one, other):
        main(bundle, output, 3, [prompts], None, [1.0], 64, 2, 1, seed=5)
    with np.load(one) as first, np.load(other) as second:
        assert (first["ids"] == second["ids"]).all()
        before = first["ids"]
    main(bundle, one, 5, [prompts], None, [1.0], 64, 2, 1, seed=5)
    with np.load(one) as grown:
        assert len(grown["ids"]) == 5
        assert (grown["ids"][:3] == before).all()
        asked = {tuple(ids[: mask.argmax()]) for ids, mask in zip(grown["ids"], grown["response_mask"], strict=True)}
    assert len(asked) == 5  # no prompt is answered twice
    with pytest.raises(RequestError, match="has conversations of 64 tokens, not 48"):
        main(bundle, one, 6, [prompts], None, [1.0], 48, 2, 1)


def test_invented_turns_follow_the_templates_opening(
    chat_bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request is the opening, perhaps with given first words, or a whole turn as the template puts it."""
    model = DSparkInference.load(chat_bundle("qwen3_target"), options=SpeculationOptions("off"), threads=1)
    submitted: list[Request] = []
    submit = model.engine.submit
    model.engine.submit = lambda request: (submitted.append(request), submit(request))[1]  # type: ignore[method-assign]
    monkeypatch.setattr("generate_data.MOST_UNFINISHED", 20)
    writer = Writer(model, Conversations(64, np.uint16), ["tead "], ["in the"], [1.0], seed=0)
    with pytest.raises(RequestError, match="does not end the user's turns"):  # this target has no idea of turns
        for _ in writer.run(50, batch_size=8):
            pass
    opening = model.encode("u: ", raw=True)
    assert {tuple(request.prompt_ids) for request in submitted} == {
        tuple(opening),
        tuple(opening + model.encode("in the", raw=True)),
        tuple(model.encode("tead ")),
    }


def test_invented_turns_are_answered(chat_bundle: Callable[[str], Path]) -> None:
    model = DSparkInference.load(chat_bundle("qwen3_target"), options=SpeculationOptions("off"), threads=1)
    stop = model.encode("tead", raw=True)[:1]
    model._stop_token_ids = frozenset(stop)
    submitted: list[Request] = []
    submit = model.engine.submit
    model.engine.submit = lambda request: (submitted.append(request), submit(request))[1]  # type: ignore[method-assign]
    conversations = Conversations(200, np.uint16)
    for _ in Writer(model, conversations, [], ["in the"], [1.0], seed=0).run(4, batch_size=4):
        pass
    openings = {tuple(model.encode("u: ", raw=True)): "", tuple(model.encode("u: in the", raw=True)): "in the"}
    invented = {
        tuple(model.encode(openings[tuple(request.prompt_ids)] + (request.completion().text or "")))
        for request in submitted
        if tuple(request.prompt_ids) in openings and request.finish_reason == "stop"
    }
    asked = [tuple(ids[: mask.argmax()]) for ids, mask in zip(conversations.ids, conversations.masks, strict=True)]
    assert len(asked) >= 4
    assert set(asked) <= invented


@pytest.mark.parametrize(
    ("row", "message"),
    [("{", "line 1 is not JSON"), ('{"messages": []}', "row 1 has no text as its prompt"), ("[1]", "no JSON object")],
)
def test_bad_prompts_are_refused_before_work(
    row: str, message: str, chat_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text(row)
    with pytest.raises(RequestError, match=message):
        main(chat_bundle("qwen3_target"), tmp_path / "out.npz", 3, [tmp_path / "bad.jsonl"])
    assert not (tmp_path / "out.npz").exists()
