"""``dspark-run generate``: standard output, standard error, and the exit code."""

import io
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.exporter.export import export_bundle, prepare
from tests.runtime.commands.support import GoldenBundle, expected, jsonl
from tests.support.command_line import Result, Run
from tests.support.golden_models import GOLDEN, PROMPTS

FIELDS = {"index", "text", "token_ids", "finish_reason", "error", "prompt_tokens", "stats"}
STATS = {
    *("rounds", "draft_lengths", "accepted_lengths", "acceptance_length"),
    *("seconds", "tokens_per_second", "time_to_first_token"),
}


def test_a_prompt_becomes_text(run: Run, vanilla: Path) -> None:
    text, _ = expected(vanilla, "tead ", max_new_tokens=40)
    assert run("generate", vanilla, "--prompt", "tead ", "--max-new-tokens", "40") == Result(0, f"{text}\n", "")


def test_text_is_printed_as_it_is_decided(run: Run, vanilla: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert run("generate", vanilla, "--prompt", "tead ", "--max-new-tokens", "40").code == 0
    text, tokens = expected(vanilla, "tead ", max_new_tokens=40)
    assert "".join(written) == f"{text}\n"
    assert 10 < len([each for each in written if each.strip()]) < len(tokens)


def test_json_has_the_fields_that_are_promised(run: Run, vanilla: Path) -> None:
    result = run("generate", vanilla, "--prompt", "tead ", "--max-new-tokens", "40", "--json")
    assert (result.code, result.error) == (0, "")
    (row,) = result.rows
    assert set(row) == FIELDS
    assert set(row["stats"]) == STATS
    assert (row["text"], row["token_ids"]) == expected(vanilla, "tead ", max_new_tokens=40)
    assert (row["index"], row["finish_reason"], row["error"], row["prompt_tokens"]) == (0, "length", None, 5)
    stats = row["stats"]
    assert stats["rounds"] == len(stats["draft_lengths"]) == len(stats["accepted_lengths"])
    assert stats["acceptance_length"] == 1 + sum(stats["accepted_lengths"]) / stats["rounds"]
    assert 0 < stats["time_to_first_token"] < stats["seconds"]
    assert stats["tokens_per_second"] == pytest.approx(40 / stats["seconds"])


def test_rows_of_every_kind_come_out_in_their_order(run: Run, chat_bundle: GoldenBundle, tmp_path: Path) -> None:
    bundle = chat_bundle("dspark_vanilla")
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "what is a class"}]
    rows: list[Mapping[str, Any]] = [
        {"prompt": "what is a class", "max_new_tokens": 50},
        {"messages": messages},
        {"prompt_ids": PROMPTS[1], "max_new_tokens": 1},
        {"prompt_ids": PROMPTS[0], "temperature": 1.0, "seed": 4},
        {"prompt": "x"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(jsonl(*rows).replace("\n", "\n\n"))  # empty lines are nothing
    prompts = ["what is a class", messages, PROMPTS[1], PROMPTS[0], "x"]
    options: list[dict[str, Any]] = [
        {"max_new_tokens": 50},
        {},
        {"max_new_tokens": 1},
        {"temperature": 1.0, "seed": 4},
        {},
    ]
    wanted = [
        expected(bundle, prompt, **{"max_new_tokens": 9, **each})  # type: ignore[arg-type]
        for prompt, each in zip(prompts, options, strict=True)
    ]
    for source, stdin in ((file, ""), ("-", file.read_text())):
        common = ["generate", bundle, "--input", source, "--max-new-tokens", "9", "--batch-size", "2"]
        common += ["--scheduler", "fixed"]  # with others a sampled text may depend on the rest of the batch
        result = run(*common, "--json", stdin=stdin)
        assert result.code == 0
        assert [row["index"] for row in result.rows] == [0, 1, 2, 3, 4]
        assert [(row["text"], row["token_ids"]) for row in result.rows] == wanted
        assert run(*common, stdin=stdin).out == "".join(f"{text}\n" for text, _ in wanted)


def test_raw_prompts_skip_the_template(run: Run, chat_bundle: GoldenBundle) -> None:
    bundle = chat_bundle("dspark_vanilla")
    templated, raw = (
        run("generate", bundle, "--prompt", "tead ", "--max-new-tokens", "12", "--json", *flags).rows[0]
        for flags in ([], ["--raw"])
    )
    assert (templated["prompt_tokens"], raw["prompt_tokens"]) == (len("u: tead \na: "), 5)
    assert raw["text"] == "in the class"


def test_every_option_is_one_of_the_api(run: Run, vanilla: Path) -> None:
    """On the command line, and in a row by its long name."""
    options: dict[str, Any] = {
        "max_new_tokens": 30,
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "seed": 11,
    }
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    whole, _ = expected(vanilla, "the ", **options)
    assert whole is not None
    stop = whole[12:15]
    text, tokens = expected(vanilla, "the ", **options, stop=("never", stop))
    assert text == whole[: whole.index(stop)]
    (row,) = run("generate", vanilla, "--prompt", "the ", *flags, "--stop", "never", "--stop", stop, "--json").rows
    assert (row["text"], row["token_ids"], row["finish_reason"]) == (text, tokens, "stop")
    stdin = jsonl({"prompt": "the ", **options, "stop": ["never", stop]}, {"prompt": "the ", **options, "stop": stop})
    defaults = ["--temperature", "2", "--stop", "t", "--seed", "1", "--max-new-tokens", "3"]
    rows = run("generate", vanilla, "--input", "-", *defaults, "--json", stdin=stdin).rows
    assert [(row["text"], row["token_ids"]) for row in rows] == [(text, tokens)] * 2
    biased = jsonl({"prompt": "the ", "logit_bias": {"122": 1000}, "max_new_tokens": 4})
    assert run("generate", vanilla, "--input", "-", stdin=biased).out == "zzzz\n"


@pytest.mark.parametrize(
    ("flags", "drafted"),
    [
        ([], {5}),
        (["--scheduler", "hardware-async"], {5}),
        (["--scheduler", "off"], {0}),
        (["--scheduler", "fixed", "--max-draft-tokens", "2"], {2}),
        (["--scheduler", "threshold"], {0, 1, 2, 3, 5}),
        (["--confidence-threshold", "1"], {0}),
    ],
)
def test_how_to_speculate(flags: list[str], drafted: set[int], run: Run, vanilla: Path) -> None:
    result = run("generate", vanilla, "--prompt", "tead ", "--max-new-tokens", "64", "--json", *flags)
    assert result.code == 0
    stats = result.rows[0]["stats"]
    emitted = 1 + np.cumsum([0, *stats["accepted_lengths"][:-1]]) + np.arange(stats["rounds"])
    lengths = [length for length, before in zip(stats["draft_lengths"], emitted, strict=True) if before <= 64 - 6]
    # Now and then a hardware scheduler decodes plainly, to know what it takes.
    assert set(lengths) - {0} == drafted - {0}
    assert (0 in lengths) >= (0 in drafted)
    assert result.rows[0]["text"][:12] == "in the class"


BAD_ROWS: list[tuple[str, str]] = [
    ("{", "is not JSON"),
    ('{"prompt": "x", "prompt": "y"}', "is not JSON: key 'prompt' stands there twice"),
    ("[1]", "line 6 is no JSON object"),
    ("{}", "a row must have exactly one of prompt, messages, prompt_ids; this one has only nothing"),
    ('{"text": "x"}', "exactly one of prompt, messages, prompt_ids; this one has only 'text'"),
    ('{"prompt": "x", "prompt_ids": [1]}', "this one has prompt and prompt_ids"),
    ('{"prompt": 7}', "prompt must be text, not 7"),
    ('{"prompt": ""}', "the prompt is empty"),
    ('{"messages": []}', "messages must be a list of messages, not []"),
    ('{"messages": [{"role": "user"}]}', "chat template"),
    ('{"prompt_ids": []}', "the prompt is empty"),
    ('{"prompt_ids": [1.5]}', "prompt_ids must be a list of token ids, not [1.5]"),
    ('{"prompt_ids": [true]}', "prompt_ids must be a list of token ids, not [true]"),
    ('{"prompt_ids": [160]}', "160, which is outside the vocabulary (0 to 159)"),
    ('{"prompt": "x", "temprature": 1}', "unknown sampling option 'temprature'; did you mean 'temperature'?"),
    ('{"prompt": "x", "index": 1}', "unknown sampling option 'index'; there are: max_new_tokens, temperature"),
    ('{"prompt": "x", "temperature": -1}', "temperature = -1: must be greater than or equal to 0"),
    ('{"prompt": "x", "temperature": "hot"}', "temperature = 'hot': must be a valid number"),
    (
        '{"prompt": "x", "max_new_tokens": 512}',
        "the prompt's 1 tokens and max_new_tokens 512 make 513; the limit is 512",
    ),
    ('{"prompt": "x", "logit_bias": {"160": 1}}', "logit_bias names token 160; the vocabulary ends at 159"),
    ('{"prompt": "\\ud800"}', "not valid Unicode"),
]


def test_bad_rows_error_alone(run: Run, vanilla: Path) -> None:
    good = json.dumps({"prompt": "tead ", "max_new_tokens": 6})
    stdin = "".join(f"{good}\n{line}\n" for line, _ in BAD_ROWS)
    result = run("generate", vanilla, "--input", "-", "--json", stdin=stdin)
    assert result.code == 0
    assert [row["index"] for row in result.rows] == list(range(2 * len(BAD_ROWS)))
    assert {row["text"] for row in result.rows[::2]} == {"in the"}
    shown = run("generate", vanilla, "--input", "-", stdin=stdin)
    assert (shown.code, shown.out) == (0, "in the\n\n" * len(BAD_ROWS))
    errors = shown.error.splitlines()
    for row, error, (line, message) in zip(result.rows[1::2], errors, BAD_ROWS, strict=True):
        assert set(row) == FIELDS, line
        assert set(row["stats"]) == STATS, line
        assert (row["finish_reason"], row["token_ids"]) == ("error", []), line
        assert message in row["error"]
        assert error == f"error: row {row['index']}: {row['error']}"


def test_only_bad_rows_are_exit_code_1(run: Run, vanilla: Path) -> None:
    stdin = "".join(f"{line}\n" for line, _ in BAD_ROWS[:3])
    result = run("generate", vanilla, "--input", "-", "--json", stdin=stdin)
    assert result.code == 1
    assert [row["finish_reason"] for row in result.rows] == ["error"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --prompt or --input"),
        (["--prompt", "x", "--input", "-"], "give either --prompt or --input"),
        (["--input", "/no/such/file.jsonl"], "/no/such/file.jsonl: cannot be read"),
        (["--prompt", "x", "--temperature", "-1"], "temperature = -1.0: must be greater than or equal to 0"),
        (["--prompt", "x", "--top-p", "0"], "top_p = 0.0: must be greater than 0"),
        (["--prompt", "x", "--stop", ""], "stop"),
        (["--prompt", "x", "--max-draft-tokens", "6"], "max_draft_tokens is 6; this drafter allows 1 to 5"),
        (["--prompt", "x", "--scheduler", "off", "--confidence-threshold", "0.5"], "belongs to scheduler 'threshold'"),
        (["--prompt", "x", "--scheduler", "off", "--max-draft-tokens", "2"], "does not go with scheduler 'off'"),
        (["--prompt", "x", "--provider", "cpu:a:"], "cpu:a:: 'a:' is no option; write cpu:key=value"),
        (["--prompt", "x", "--batch-size", "0"], "batch_size is 0; it must be from 1 to"),
        (["--prompt", "x", "--threads", "0"], "threads is 0; it must be from 1 to"),
        (["--prompt", "x", "--max-new-tokens", "512"], "the limit is 512"),
        (["--prompt", ""], "the prompt is empty"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_1(arguments: list[str], message: str, run: Run, vanilla: Path) -> None:
    result = run("generate", vanilla, *arguments)
    assert result.code == 1
    assert result.out.strip() == ""
    assert result.error.startswith("error: ")
    assert message in result.error
    assert result.error.count("\n") == 1


def test_input_that_is_not_text(run: Run, vanilla: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xff"}\n' + b"[" * 100_000 + b'\n{"messages": [1, 2]}\n'
    )
    for source in (file, "-"):
        result = run("generate", vanilla, "--input", source, "--json", stdin=file.read_bytes())
        assert result.code == 0
        fine, *bad = [json.loads(line) for line in result.out.splitlines()]
        assert fine["error"] is None
        assert "line 2 is not JSON: 'utf-8'" in bad[0]["error"]
        assert "line 3 is not JSON" in bad[1]["error"]
        assert "messages must be a list of messages" in bad[2]["error"]


def test_no_rows_are_no_failure(run: Run, vanilla: Path) -> None:
    assert run("generate", vanilla, "--input", "-", "--json", stdin="\n") == Result(0, "", "")


def test_null_is_the_default(run: Run, vanilla: Path) -> None:
    row = {"prompt": "tead ", "stop": None, "temperature": None, "priority": None, "max_new_tokens": 6}
    assert [row["text"] for row in run("generate", vanilla, "--input", "-", "--json", stdin=jsonl(row)).rows] == [
        "in the"
    ]


def test_stop_token_ids(run: Run, vanilla: Path) -> None:
    whole, _ = expected(vanilla, "tead ", max_new_tokens=6)
    assert whole == "in the"
    flags = ["--stop-token-id", "1", "--stop-token-id", str(ord("t")), "--max-new-tokens", "6"]
    assert run("generate", vanilla, "--prompt", "tead ", *flags).out == "in \n"
    stdin = jsonl({"prompt": "tead ", "stop_token_ids": [ord("h")], "max_new_tokens": 6})
    assert run("generate", vanilla, "--input", "-", stdin=stdin).out == "in t\n"


def test_nothing_that_a_template_says_breaks_the_output(run: Run, tmp_path: Path) -> None:
    target = shutil.copytree(GOLDEN / "qwen3_target", tmp_path / "target")
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    export_bundle(prepare(target, None, tmp_path / "bundle"))
    rows = jsonl(*({"messages": [{"role": role, "content": "x"}]} for role in ("user", "\ud800", "user")))
    result = run("generate", tmp_path / "bundle", "--input", "-", "--json", "--max-new-tokens", "2", stdin=rows)
    assert result.code == 0
    assert [row["finish_reason"] for row in result.rows] == ["length", "error", "length"]
    assert result.rows[1]["error"] == "the chat template refuses the messages: unknown role \\ud800"
    bias = jsonl({"prompt": "x", "logit_bias": {"\udfff": 1}})
    assert "\\udfff" in run("generate", tmp_path / "bundle", "--input", "-", "--json", stdin=bias).rows[0]["error"]


def test_without_a_tokenizer_ids_need_json(run: Run, tmp_path: Path) -> None:
    target = shutil.copytree(GOLDEN / "qwen3_target", tmp_path / "target")
    (target / "tokenizer.json").unlink()
    export_bundle(prepare(target, None, tmp_path / "bundle"))
    arguments = ("generate", tmp_path / "bundle", "--input", "-", "--max-new-tokens", "3")
    stdin = jsonl({"prompt_ids": [116, 101]})
    refused = run(*arguments, stdin=stdin)
    assert (refused.code, refused.out) == (1, "")
    assert "bundle: has no tokenizer, so there is no text to print; add --json to print token ids" in refused.error
    (row,) = run(*arguments, "--json", stdin=stdin).rows
    assert (row["text"], len(row["token_ids"])) == (None, 3)
