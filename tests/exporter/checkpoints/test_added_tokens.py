"""Added tokens that stand in other files than tokenizer.json."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.exporter.checkpoints import read_target
from dspark.exporter.errors import CheckpointError
from dspark.runtime.text.tokenizer import TextProcessor
from tests.exporter.checkpoints.editing import Checkpoint

Copy = Callable[[str], Checkpoint]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi"}]
IDS = [130, 117, 115, 101, 114, 10, 72, 105, 131, 10, 130]  # as transformers 5.25 encodes it from each of these folders
MARKERS = {"<|im_start|>": 130, "<|im_end|>": 131}


def chat_folder(copy: Copy, **config: Any) -> Path:
    """A golden target whose tokenizer.json ends with token 129; `config` goes into tokenizer_config.json."""
    folder = copy("llama_target").folder
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {text: id_ for text, id_ in tokenizer["model"]["vocab"].items() if id_ < 130}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": CHATML} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


def decoder(**tokens: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"added_tokens_decoder": {str(id_): {"content": text, **flags} for text, id_ in tokens.items()}}


def in_the_legacy_file(copy: Copy) -> Path:
    folder = chat_folder(copy)
    (folder / "added_tokens.json").write_text(json.dumps(dict(reversed(MARKERS.items()))))
    return folder


def in_the_configuration(copy: Copy) -> Path:
    return chat_folder(copy, **decoder(**MARKERS))


PLACES = {"added_tokens.json": in_the_legacy_file, "added_tokens_decoder": in_the_configuration}


def processor(folder: Path) -> TextProcessor:
    text = read_target(folder).text
    assert text.tokenizer is not None
    return TextProcessor(text.tokenizer, text.chat_template, text.special_tokens)


@pytest.mark.parametrize("place", PLACES)
def test_markers_are_single_tokens_wherever_they_stand(place: str, copy: Copy) -> None:
    folder = PLACES[place](copy)
    assert processor(folder).encode_chat(CHAT) == IDS
    (note,) = [note for note in read_target(folder).notes if "added tokens" in note]
    assert re.search(rf"merged into the tokenizer from .*{place}.*: '<\|im_start\|>', '<\|im_end\|>'", note)


@pytest.mark.parametrize("place", PLACES)
def test_transformers_merges_them_alike(place: str, copy: Copy) -> None:
    transformers = pytest.importorskip("transformers")
    folder = PLACES[place](copy)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.encode(theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)) == IDS
    assert theirs.decode(IDS, skip_special_tokens=True) == processor(folder).decode(IDS)


def test_only_special_ones_are_silent(copy: Copy, tmp_path: Path) -> None:
    assert processor(in_the_configuration(copy)).decode([130, 72]) == "H"
    shutil.rmtree(tmp_path / "llama_target")
    assert processor(in_the_legacy_file(copy)).decode([130, 72]) == "<|im_start|>H", "added_tokens.json has no flags"


def test_a_special_token_of_the_legacy_file_is_special(copy: Copy) -> None:
    folder = in_the_legacy_file(copy)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = ["<|im_start|>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert processor(folder).decode([130, 72, 131]) == "H<|im_end|>"


def test_a_named_special_token_of_the_vocabulary_is_found_in_text(copy: Copy) -> None:
    folder = copy("llama_target").folder
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<unused140>"}))
    assert processor(folder).encode("a<unused140>b") == [97, 140, 98]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "[new]"}))
    assert processor(folder).encode("[new]") == list(b"[new]")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"<|im_end|>": 131}, r"gives '<\|im_end\|>' the id 131, but in .*tokenizer\.json it has 130"),
        ({"<eos>": 130}, "gives '<eos>' the id 130, but in .*tokenizer.json it has 129"),
        ({"<other>": 129}, "gives '<other>' the id 129, but in .*tokenizer.json it has 130"),
        ({"<x>": "130"}, "gives '<x>' the id '130'; a whole number is needed"),
    ],
)
def test_contradictions_are_refused(tokens: dict[str, Any], message: str, copy: Copy) -> None:
    folder = chat_folder(copy)
    (folder / "added_tokens.json").write_text(json.dumps(tokens))
    with pytest.raises(CheckpointError, match=message):
        read_target(folder)


@pytest.mark.parametrize("content", [["<x>"], {"130": "<x>"}, {"130": {"special": True}}, {"x": {"content": "<x>"}}])
def test_a_damaged_decoder_is_refused(content: Any, copy: Copy) -> None:
    with pytest.raises(CheckpointError, match=r"added_tokens_decoder of .*tokenizer_config\.json is damaged"):
        read_target(chat_folder(copy, added_tokens_decoder=content))


def test_tokens_without_embeddings_are_told(copy: Copy) -> None:
    checkpoint = copy("llama_target")
    tokenizer = json.loads((checkpoint.folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": 160 + index, "content": text, **flags} for index, text in enumerate(["<extra>", "<|im_start|>"])
    ]
    (checkpoint.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (note,) = [note for note in read_target(checkpoint.folder).notes if "embeddings" in note]
    assert "embeddings for 160 tokens; prompts that hold one beyond are refused: '<extra>' = 160" in note
    (checkpoint.folder / "chat_template.jinja").write_text("<|im_start|>{{ messages }}")
    (note,) = [note for note in read_target(checkpoint.folder).notes if "embeddings" in note]
    assert note.endswith("refused: '<|im_start|>' = 161, which its chat template writes")
