"""Arguments of other types are refused in the project's own words, before anything is done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.providers import Selection
from dspark.runtime import (
    Bundle,
    Conversation,
    DSparkError,
    DSparkInference,
    RequestError,
    SamplingParams,
    SpeculationOptions,
)
from dspark.runtime.arguments import check_argument
from dspark.runtime.bundle.manifest import read_manifest
from dspark.runtime.loading.serving_profile import find_profile
from tests.support.golden_models import load

GoldenBundle = Callable[[str], Path]


@pytest.mark.parametrize(
    ("value", "kinds"),
    [(3, int), ("x", str), (None, (str, type(None))), (True, bool), (2.5, (int, float)), (True, (bool, str))],
)
def test_what_is_right(value: object, kinds: Any) -> None:
    check_argument("it", value, kinds, "right")


@pytest.mark.parametrize(
    ("value", "kinds"), [("3", int), (True, int), (False, (int, float)), (None, str), (b"x", str), (2.0, int)]
)
def test_what_is_not(value: object, kinds: Any) -> None:
    with pytest.raises(RequestError) as raised:
        check_argument("it", value, kinds, "something else")
    assert str(raised.value) == f"it is {value!r}; it must be something else"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": 3}, "sampling option stop = 3: must be a valid tuple"),
        ({"stop": [3]}, "sampling option stop.0 = 3: must be a valid string"),
        ({"stop": b"x"}, "sampling option stop = b'x': must be a valid tuple"),
        ({"max_new_tokens": "x"}, "sampling option max_new_tokens = 'x': must be a valid integer"),
        ({"max_new_tokens": 2.5}, "sampling option max_new_tokens = 2.5: must be a valid integer"),
        ({"max_new_tokens": True}, "sampling option max_new_tokens = True: must be a valid integer"),
        ({"temperature": None}, "sampling option temperature = None: must be a valid number"),
        ({"temperature": -1.0}, "sampling option temperature = -1.0: must be greater than or equal to 0"),
        ({"logit_bias": [1]}, "sampling option logit_bias = [1]: must be a valid dictionary"),
        ({"temprature": 1.0}, "unknown sampling option 'temprature'; did you mean 'temperature'?"),
        ({"top_k": -1, "seed": "x"}, "top_k = -1: must be greater than or equal to 0; sampling option seed = 'x'"),
    ],
)
def test_sampling_params(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**options)
    assert message in str(raised.value)


@pytest.mark.parametrize("profile", [7, True, b"flash", ["flash"], {"draft_ratio": 1}])
def test_profiles(profile: Any) -> None:
    with pytest.raises(RequestError, match=r"^profile is .*; it must be the name of a profile \(flash, pro\) or"):
        find_profile(profile)


@pytest.mark.parametrize("path", [None, 3, b"bundle", ["bundle"]])
def test_bundles(path: Any) -> None:
    with pytest.raises(RequestError, match=r"^bundle is .*; it must be a folder's path"):
        Bundle.open(path)


@pytest.mark.parametrize("texts", [None, 3, b"cpu", ["cpu", 3], {"cpu": 1}])
def test_providers(texts: Any) -> None:
    with pytest.raises(DSparkError, match=r"^provider is .*; it must be "):
        Selection.parse(texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": 3}, "scheduler is 3; there are hardware"),
        ({"max_draft_tokens": True}, "max_draft_tokens is True; this drafter allows 1 to 5"),
        ({"max_draft_tokens": 2.0}, "max_draft_tokens is 2.0; this drafter allows 1 to 5"),
        ({"confidence_threshold": True}, "confidence_threshold is True; it is a probability from 0 to 1"),
        ({"confidence_threshold": "0.5"}, "confidence_threshold is 0.5; it is a probability from 0 to 1"),
    ],
)
def test_speculation(options: dict[str, Any], message: str, golden_bundle: GoldenBundle) -> None:
    manifest = read_manifest(golden_bundle("dspark_vanilla"))
    with pytest.raises(RequestError, match=message):
        SpeculationOptions(**options).resolve(manifest)


def test_conversations(chat_bundle: GoldenBundle) -> None:
    model: Any
    for model in (None, "bundle", 3):
        with pytest.raises(RequestError, match=r"^inference is .*; it must be a loaded bundle"):
            Conversation(model)
    model = load(chat_bundle("dspark_vanilla"))
    text: Any
    for text in (3, b"x", ["x"]):
        with pytest.raises(RequestError, match=r"^system is .*; it must be text"):
            Conversation(model, text)
    for text in (None, 3, b"x", {"role": "user"}):
        with pytest.raises(RequestError, match=r"^text is .*; it must be text"):
            list(Conversation(model).reply(text))


@pytest.mark.parametrize(
    "arguments",
    [
        *({"provider": value} for value in (3, [], ["cpu", 3], b"cpu", {"a": 1})),
        *({"threads": value} for value in ("4", 2.0, True, 0)),
        *({"batch_size": value} for value in ("4", 2.5, True, 0)),
        *({"max_sequence_length": value} for value in ("x", [1], 100.0, True)),
        *({"options": value} for value in ("fixed", {}, 3)),
        *({"profile": value} for value in (7, ["x"], b"flash", {}, True)),
        *({"notify": value} for value in (None, "x")),
        *({name: "x"} for name in ("allow_fallback", "shared", "check_hashes")),
    ],
    ids=str,
)
def test_loading(arguments: dict[str, Any], golden_bundle: GoldenBundle) -> None:
    (name,) = arguments
    with pytest.raises(DSparkError, match=rf"^(\S+: )?{name} is "):
        DSparkInference.load(golden_bundle("dspark_vanilla"), **arguments)


def test_generating(golden_bundle: GoldenBundle) -> None:
    model: Any = load(golden_bundle("dspark_vanilla"))
    params = SamplingParams(max_new_tokens=2)
    for prompts in (None, 3, {"a"}, {"a": 1}, iter(["a"])):
        with pytest.raises(RequestError, match=r"^prompts is .*; it must be a list of prompts"):
            model.generate(prompts, params)
    for prompt in (None, 3, b"x", {"a": 1}):
        with pytest.raises(RequestError, match="a prompt must be text, token ids or chat messages, not"):
            model.generate([prompt], params)
    for other in ("x", 3, [3], ["x"], {}, True, 0):
        with pytest.raises(RequestError, match="params is "):
            model.generate(["a"], other)
        with pytest.raises(RequestError, match="params is "):
            model.stream("a", other)
    with pytest.raises(RequestError, match="prefix is 'x'"):
        model.request("a", params, prefix="x")
    for requests in (None, 3):
        with pytest.raises(RequestError, match="requests is "):
            model.run(requests)
    for request in (None, "x", 3):
        with pytest.raises(RequestError, match="request is "):
            model.run([request])
        with pytest.raises(RequestError, match="request is "):
            list(model.follow(request))
    (done,) = model.generate(["tead "], params)
    assert done.error is None
