"""``dspark-run`` as its users see it: standard output, standard error, and the exit code."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.runtime import SamplingParams
from dspark.runtime.engine.engine import Engine
from tests.runtime.command_line import Result, Run
from tests.runtime.golden_models import PROMPTS, ids, load

GoldenBundle = Callable[[str], Path]

COMMAND = [sys.executable, "-c", "from dspark.runtime.commands.app import main; main()"]
FIELDS = {"index", "text", "token_ids", "finish_reason", "error", "prompt_tokens", "stats"}
STATS = {
    *("rounds", "draft_lengths", "accepted_lengths", "acceptance_length"),
    *("seconds", "tokens_per_second", "time_to_first_token"),
}


@pytest.fixture
def vanilla(golden_bundle: GoldenBundle) -> Path:
    return golden_bundle("dspark_vanilla")


def jsonl(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def expected(bundle: Path, prompt: Sequence[int] | str, **options: Any) -> tuple[str | None, list[int]]:
    completion = loaded(bundle).generate([prompt], SamplingParams(**options))[0]
    return completion.text, completion.token_ids


loaded = cache(load)


# --- generate ---


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


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--max-draft-tokens", "2", "max_draft_tokens"),
        ("--confidence-threshold", "0.3", "confidence_threshold"),
        ("--scheduler", "fixed", "scheduler 'fixed'"),
    ],
)
def test_without_a_drafter_nothing_can_be_said_of_drafts(
    option: str, value: str, name: str, run: Run, golden_bundle: GoldenBundle
) -> None:
    """But by a serving profile, which many bundles share."""
    bundle = golden_bundle("qwen3_target")
    for command in (["generate", "--prompt", "x"], ["chat"], ["bench"], ["bench", "--profile-graph"]):
        result = run(command[0], bundle, *command[1:], option, value)
        assert (result.code, result.out.strip()) == (1, "")
        assert result.error.startswith(f"error: {name} needs a drafter, and this bundle has none; ")
    assert run("generate", bundle, "--prompt", "tead ", "--profile", "flash", "--max-new-tokens", "6").out == "in the\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--scheduler", "sideways", "'threshold', 'fixed', 'off'"),
        ("--top-k", "many", "integer"),
        ("--max-new-token", "3", "--max-new-tokens"),
    ],
)
def test_what_is_no_option_is_explained(option: str, value: str, message: str, run: Run, vanilla: Path) -> None:
    result = run("generate", vanilla, "--prompt", "x", option, value)
    assert result.code == 2
    assert option in result.error
    assert message in result.error


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


@pytest.mark.parametrize("arguments", [["generate", "--prompt", "x"], ["chat"], ["inspect"], ["bench"]])
def test_no_bundle_is_exit_code_1(arguments: list[str], run: Run, tmp_path: Path) -> None:
    result = run(arguments[0], tmp_path, *arguments[1:])
    assert (result.code, result.out) == (1, "")
    assert result.error.endswith("no bundle here (manifest.json is missing); make one with dspark-export\n")


def test_help(run: Run) -> None:
    listed = run("--help")
    assert listed.code == 0
    for command in ("generate", "chat", "inspect", "bench", "profile", "evaluate", "calibrate"):
        assert command in listed.out
        assert run(command, "--help").code == 0


# --- chat ---


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
    assert result.error == "error: this bundle has no chat template, which a conversation needs; use generate\n"


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


# --- inspect and bench ---


def test_inspect(run: Run, golden_bundle: GoldenBundle) -> None:
    for name in ("qwen3_target", "dspark_gated", "eagle3"):
        result = run("inspect", golden_bundle(name))
        assert result.code == 0
        described = ["qwen3_target (qwen3)", "512 tokens", "weights.bin", "129"]
        described += ["No drafter"] if name == "qwen3_target" else [name]
        for text in described:
            assert text in result.out
        manifest = json.loads((golden_bundle(name) / "manifest.json").read_text())
        assert json.loads(run("inspect", golden_bundle(name), "--json").out) == {**manifest, "engines": []}


@pytest.mark.parametrize(("option", "value"), [("--provider", "cpu"), ("--threads", "1")])
def test_inspect_refuses_what_only_the_placement_takes(option: str, value: str, run: Run, vanilla: Path) -> None:
    result = run("inspect", vanilla, option, value)
    assert (result.code, result.out, result.error) == (1, "", f"error: {option} needs --placement\n")


@pytest.mark.parametrize("name", ["qwen3_target", "dspark_vanilla", "eagle3"])
def test_bench(name: str, run: Run, golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(jsonl({"prompt_ids": PROMPTS[0]}, {"prompt": "tead "}))
    arguments = ["bench", golden_bundle(name), "--input", prompts, "--max-new-tokens", "12"]
    report = json.loads(run(*arguments, "--repeats", "2", "--json").out)
    assert (report["identical_outputs"], report["prompts"]) == (4, 4)
    assert report["plain"]["acceptance_length"] == 1
    assert report["plain"]["drafting_share"] == 0
    phases = report["plain"]["milliseconds_per_round"]
    assert {"draft", "head", "verify", "schedule", "host", "total"} == set(phases)
    assert phases["draft"] == phases["head"] == 0
    assert phases["total"] > 0
    result = run(*arguments)
    assert result.code == 0
    assert "Plain decoding over the bare graph call" in result.out
    if name == "qwen3_target":
        assert report["speculative"] is None
        assert "Speed-up" not in result.out
    else:
        assert report["speculative"]["acceptance_length"] > 1
        assert 0 < report["speculative"]["drafting_share"] <= 1  # on a model this small drafts hardly pay
        assert report["speedup"] > 0
        assert report["possible_speedup"] > 0
        assert "Outputs identical with and without speculation: 2 of 2" in result.out


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_bench_names_the_most_expensive_operators(name: str, run: Run, golden_bundle: GoldenBundle) -> None:
    arguments = ["bench", golden_bundle(name), "--max-new-tokens", "6", "--profile-graph"]
    graphs = json.loads(run(*arguments, "--json").out)
    assert graphs.keys() == ({"target", "drafter"} if name == "eagle3" else {"target", "drafter", "head"})
    for operators in graphs.values():
        assert 1 < len(operators) <= 10
        shares = [each["share"] for each in operators]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1.0001
        assert len({(each["name"], each["operator"]) for each in operators}) == len(operators)
        assert all(each["runs"] > 0 and each["seconds"] > 0 for each in operators)
    down = [each for each in graphs["target"] if each["operator"] == "Gemm"]
    assert any("layers.*/mlp" in each["name"] for each in down)
    assert "Most expensive operators of the target graph" in run(*arguments).out


def test_bench_has_prompts_of_its_own(run: Run, vanilla: Path) -> None:
    result = run("bench", vanilla, "--max-new-tokens", "3", "--json")
    assert result.code == 0
    assert json.loads(result.out)["prompts"] > 1


def test_bench_refuses_a_bad_row(run: Run, vanilla: Path) -> None:
    for row, message in (("{", "not JSON"), ('{"prompt": ""}', "the prompt is empty")):
        result = run("bench", vanilla, "--input", "-", "--max-new-tokens", "3", stdin=row)
        assert result.code == 1
        assert message in result.error


def test_bench_refuses_what_generate_refuses(run: Run, vanilla: Path) -> None:
    for arguments, message in (
        (["--threads", "3000"], "threads is 3000"),
        (["--max-new-tokens", "1"], "max_new_tokens of at least 2"),
        (["--repeats", "0"], "repeats of at least 1"),
        (["--profile-graph", "--repeats", "2"], "--repeats does not go with --profile-graph"),
        (["--profile-graph", "--max-new-tokens", "0"], "max_new_tokens of at least 2; there are 4 prompts and 0"),
        (["--profile-graph", "--input", "/dev/null"], "needs prompts and max_new_tokens of at least 2; there are 0"),
    ):
        result = run("bench", vanilla, *arguments)
        assert result.code == 1
        assert message in result.error


def test_bench_refuses_an_altered_bundle(run: Run, vanilla: Path, tmp_path: Path) -> None:
    altered = Path(shutil.copytree(vanilla, tmp_path / "altered"))
    content = bytearray((altered / "weights.bin").read_bytes())
    content[-1] ^= 1
    (altered / "weights.bin").write_bytes(content)
    result = run("bench", altered, "--max-new-tokens", "3")
    assert result.code == 1
    assert "weights.bin: altered since export" in result.error


# --- the process ---


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_ends_generate_with_130(vanilla: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(jsonl(*[{"prompt_ids": ids("tead "), "max_new_tokens": 500}] * 500))
    command = [*COMMAND, "generate", str(vanilla), "--input", str(file), "--batch-size", "1"]
    listens = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=listens) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"i"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in error


def test_a_reader_that_goes_away_ends_it_quietly(vanilla: Path) -> None:
    stdin = jsonl(*[{"prompt_ids": ids("tead "), "max_new_tokens": 100}] * 20).encode()
    command = [*COMMAND, "generate", str(vanilla), "--input", "-", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(stdin)
        process.stdin.close()
        assert json.loads(process.stdout.readline())["index"] == 0
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode != 0
