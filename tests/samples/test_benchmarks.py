"""The race against the peers: what workers say, who works when, and the figures. No peer is needed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "samples" / "benchmarks"))

import contestants
import peers
import prepare
import protocol
import race
import results
from contestants import CONTESTANTS, CONVERSIONS, ENVIRONMENTS, SHIPPED, Contestant, Conversion, Folders, ours
from protocol import Answer, Failure, Message, Output, Ready, Request
from race import Result, Worker, WorkerError

from dspark.runtime import DSparkInference, SamplingParams, SpeculationOptions

# Says what its model, a JSON file, tells it to say, and notes when it worked.
FAKE_WORKER = """
import json, os, time
from protocol import Output, parser, serve

options = parser("fake").parse_args()
plan = json.loads(options.model.read_text())

def load():
    print("a library's greeting")
    os.write(1, b"and one from C\\n")
    if plan.get("broken"):
        raise OSError("the model is broken")

    def generate(request):
        output, start = Output(), time.monotonic()
        if request.prompt_ids[0] == plan.get("refuses"):
            raise ValueError("not this prompt")
        if request.prompt_ids[0] == plan.get("dies"):
            raise SystemExit("out of memory")
        for token in plan["tokens"][: request.max_new_tokens]:
            output.write([token])
        with open(plan["log"], "a") as log:
            print(json.dumps([plan["name"], request.prompt_ids, start, time.monotonic()]), file=log)
        return output.answer()

    return generate

serve(load, ["pip"])
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Contestant]:
    """Makes contestants of the fake worker, which stands beside the real ones in the namespace ``workers``."""
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "fake.py").write_text(FAKE_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name: str, **plan: object) -> Contestant:
        model = tmp_path / f"{name}.json"
        model.write_text(json.dumps({"name": name, "tokens": [7, 8, 9], "log": str(tmp_path / "log"), **plan}))
        return Contestant(name, Path(sys.executable), "fake", model, (), peer=True)

    return make


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Contestant], Worker]]:
    started = []

    def make(contestant: Contestant) -> Worker:
        started.append(Worker(contestant.command(1, 64), os.environ, tmp_path / "errors"))
        return started[-1]

    yield make
    for worker in started:
        worker.close()


def request(*prompt_ids: int, max_new_tokens: int = 3) -> Request:
    return Request(list(prompt_ids), max_new_tokens, [2])


@pytest.mark.parametrize(
    "message",
    [request(1, 2), Ready({"engine": "1.2"}), Answer([1, 2], 1, 0.1, 0.2), Failure("the prompt\nis too long")],
)
def test_a_message_is_one_line_and_survives(message: Message) -> None:
    line = protocol.write(message)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert protocol.read(line) == message


@pytest.mark.parametrize("line", ["", "Loading…", "[]", "{}", '{"Answer": {}}', '{"Other": {}}', '{"Answer": 1}'])
def test_other_lines_are_no_messages(line: str) -> None:
    with pytest.raises(ValueError, match="not a message"):
        protocol.read(line)


def test_output_separates_the_prompt_from_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 13.0, 14.0, 18.0])
    monkeypatch.setattr(protocol, "perf_counter", lambda: next(times))
    output = Output(_start=protocol.perf_counter())
    for tokens in ([], [5, 6], [], [7], [8, 9]):
        output.write(tokens)
    assert output.answer() == Answer([5, 6, 7, 8, 9], first_tokens=2, prefill_seconds=3.0, decode_seconds=5.0)


def test_no_output_is_no_answer() -> None:
    with pytest.raises(ValueError, match="no token"):
        Output().answer()


def test_a_worker_answers_whatever_its_libraries_print(
    fake: Callable[..., Contestant], start: Callable[[Contestant], Worker]
) -> None:
    worker = start(fake("one"))
    assert list(worker.versions) == ["pip"]
    assert [worker.ask(request(1, max_new_tokens=length)).token_ids for length in (1, 3)] == [[7], [7, 8, 9]]


def test_a_worker_tells_what_went_wrong(
    fake: Callable[..., Contestant], start: Callable[[Contestant], Worker], tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match="OSError: the model is broken"):
        start(fake("broken", broken=True))
    worker = start(fake("choosy", refuses=4, dies=5))
    with pytest.raises(WorkerError, match="ValueError: not this prompt"):
        worker.ask(request(4))
    assert worker.ask(request(1)).token_ids == [7, 8, 9]
    with pytest.raises(WorkerError, match="ended with code 1: out of memory"):
        worker.ask(request(5))
    with pytest.raises(WorkerError, match="ended with code 1"):
        worker.ask(request(1))
    with pytest.raises(WorkerError, match="cannot start"):
        Worker([str(tmp_path / "absent")], os.environ, tmp_path / "errors")


def test_a_silent_worker_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(WorkerError, match="no answer in 0 seconds"):
        Worker([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "errors")


def test_each_prompt_is_everybodys_turn_in_another_order() -> None:
    found = list(race.orders(3, 4))
    assert found == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_contestants_work_in_turn(fake: Callable[..., Contestant], tmp_path: Path) -> None:
    requests = [request(1, 2), request(3, 4), request(5, 6)]
    names = ["a", "b", "c"]
    found = race.run([fake(name) for name in names], requests, 1, lambda text: None)
    assert [result.error for result in found] == [None] * 3
    assert [[answer.token_ids for answer in result.answers] for result in found] == [[[7, 8, 9]] * 3] * 3
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    warm_up, raced = log[:3], log[3:]
    assert [(name, ids) for name, ids, *_ in warm_up] == [(name, [2, 1]) for name in names]
    assert [name for name, *_ in raced] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [ids for _, ids, *_ in raced] == [[1, 2]] * 3 + [[3, 4]] * 3 + [[5, 6]] * 3
    assert all(end <= start for (*_, end), (*_, start, _) in pairwise(log))


def test_who_fails_is_out_and_the_others_go_on(fake: Callable[..., Contestant]) -> None:
    racing = [fake("steady"), fake("broken", broken=True), fake("choosy", refuses=3), fake("mortal", dies=5)]
    found = race.run(racing, [request(1), request(3), request(5)], 1, lambda text: None)
    assert [len(result.answers) for result in found] == [3, 0, 1, 2]
    assert [result.error for result in found] == [
        None,
        "OSError: the model is broken",
        "ValueError: not this prompt",
        "the process ended with code 1: out of memory",
    ]


def result(name: str, *answers: Answer, peer: bool = True, error: str | None = None) -> Result:
    contestant = Contestant(name, Path("python"), "fake", Path("model"), (), peer)
    return Result(contestant, {name: "1.0"}, list(answers), error)


REFERENCE = result("ours", Answer([1, 2, 3], 1, 1.0, 1.0), Answer([4, 5, 6, 7], 1, 1.0, 1.0), peer=False)


def test_figures_are_medians_over_prompts() -> None:
    answers = [Answer([0] * 5, 1, 1.0, 2.0), Answer([0] * 4, 2, 3.0, 0.5), Answer([0], 1, 0.5, 0.0)]
    found = results.figures(answers)
    assert found.decoding == pytest.approx(3.0)  # 2 and 4 tokens a second; the third has nothing to decode
    assert found.whole == pytest.approx(5 / 3)  # of 5/3, 4/3.5 and 2
    assert found.tokens == 10
    assert results.figures(answers[2:]).decoding is None


def test_standings_compare_with_the_reference_and_the_best_peer() -> None:
    swift = result("swift", Answer([1, 2, 3], 1, 1.0, 0.25), Answer([4, 5, 6, 8], 1, 1.0, 0.5))  # 8 and 6
    slow = result("slow", Answer([1, 2, 3], 1, 1.0, 2.0), Answer([4, 5, 6, 7], 1, 1.0, 3.0))  # 1 and 1
    faster = result("own", Answer([1, 2, 3], 1, 1.0, 0.1), Answer([4, 5, 6, 7], 1, 1.0, 0.1), peer=False)
    lost = result("lost", Answer([1, 2, 3], 1, 1.0, 0.01), error="broken")
    found = results.standings([REFERENCE, swift, slow, faster, lost], ["gsm8k", "mbpp"])
    assert [each.over_reference for each in found] == pytest.approx([1.0, 2.8, 0.4, 10.0, None])
    assert [each.over_best_peer for each in found] == pytest.approx([2.5 / 7, 1.0, 1 / 7, 25 / 7, None])
    assert [each.identical for each in found] == [2, 1, 2, 2, None]
    assert {name: each.decoding for name, each in found[1].datasets.items()} == pytest.approx({"gsm8k": 8, "mbpp": 6})


def test_without_a_reference_or_peers_there_are_no_ratios() -> None:
    own = result("own", *REFERENCE.answers, peer=False)
    found = results.standings([result("ours", peer=False, error="no memory"), own], ["gsm8k", "mbpp"])
    assert found[1].figures is not None
    assert (found[1].over_reference, found[1].over_best_peer, found[1].identical) == (None, None, None)


def test_the_table_shows_the_fastest_first_and_who_failed() -> None:
    swift = result("swift", Answer([1, 2, 3], 1, 1.0, 0.25), Answer([4, 5, 6, 8], 1, 1.0, 0.5))
    lost = result("lost", error="ImportError: [no] engine")
    found = results.standings([REFERENCE, swift, lost], ["gsm8k", "mbpp"])
    console = Console(record=True, width=80, file=StringIO())
    results.show(console, found, ["absent int4"])
    text = console.export_text()
    rows = {row[1]: row for row in (line.split() for line in text.splitlines()) if len(row) > 2 and row[0] == "│"}
    assert list(rows) == ["swift", "ours", "lost"]
    assert rows["swift"][3::2] == ["7.0", "2.5", "2.80", "1.00", "50%", "7"]
    assert "failed" in rows["lost"]
    assert "ImportError: [no] engine" in text
    assert "absent int4" in text
    row = results.as_dict(found, ["absent int4"])["contestants"][1]
    assert (row["over_reference"], row["identical_outputs"], row["prompts"][0]["decode_seconds"]) == (2.8, 1, 0.25)
    json.dumps(row)


def test_every_peer_has_an_environment_a_worker_and_a_model() -> None:
    made = [SHIPPED]
    for name, conversion in CONVERSIONS.items():
        assert conversion.environment in ENVIRONMENTS
        assert conversion.source in made
        made.append(name)
    for peer in CONTESTANTS.values():
        assert peer.environment in ENVIRONMENTS
        assert peer.model in made
        assert (contestants.HERE / "workers" / f"{peer.worker}.py").exists()


def test_what_is_not_prepared_is_not_installed(tmp_path: Path) -> None:
    peer, folders = CONTESTANTS["llama.cpp Q4_1"], Folders(tmp_path)
    contestant = peer.contestant("llama.cpp Q4_1", folders)
    for needed in (contestant.python, contestant.model):
        assert not contestant.installed
        needed.parent.mkdir(parents=True)
        needed.touch()
    assert contestant.installed


def test_preparing_keeps_what_is_there_and_removes_what_is_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = []

    def install(name: str, folder: Path) -> None:
        installed.append(name)
        (folder / "bin").mkdir(parents=True)
        if name == "bad":
            raise subprocess.CalledProcessError(1, "pip")
        (folder / "bin" / "python").symlink_to(sys.executable)

    copy = ("-c", "import shutil, sys; shutil.copy(*sys.argv[1:])", "{source}", "{output}")
    half = ("-c", "import shutil, sys; shutil.copy(*sys.argv[1:]); sys.exit(1)", "{source}", "{output}")
    monkeypatch.setattr(prepare, "install", install)
    monkeypatch.setattr(prepare, "ENVIRONMENTS", dict.fromkeys(["good", "bad"], ENVIRONMENTS["genai"]))
    models = {"copy": Conversion("good", copy, SHIPPED), "copy of copy": Conversion("good", copy, "copy")}
    models |= {"half": Conversion("good", half, SHIPPED), "nothing": Conversion("bad", copy, SHIPPED)}
    monkeypatch.setattr(prepare, "CONVERSIONS", models)
    (tmp_path / "model.gguf").write_text("weights")
    root = tmp_path / "peers"
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"bad, .*half, .*nothing"):
            prepare.main(tmp_path / "model.gguf", root, None)
    assert installed == ["good", "bad", "bad"]
    assert not (root / "bad").exists()
    assert {path.name: path.read_text() for path in (root / "models").iterdir()} == dict.fromkeys(
        [SHIPPED, "copy", "copy of copy"], "weights"
    )
    with pytest.raises(SystemExit, match="no environment 'other'; there are good, bad"):
        prepare.main(tmp_path / "model.gguf", root, ["other"])


def test_bundles_run_plainly_and_as_their_drafter_allows(chat_bundle: Callable[[str], Path]) -> None:
    options = SpeculationOptions(None, 2, 0.5)
    ways = {
        name: [(one.name, one.arguments) for one in ours("fp32", chat_bundle(name), options)]
        for name in ("dspark_vanilla", "dflash", "qwen3_target")
    }
    plain = ("dspark fp32 plain", ("--scheduler=off",))
    speculative = ("--max-draft-tokens=2", "--confidence-threshold=0.5")
    assert ways["dspark_vanilla"] == [plain, ("dspark fp32 speculative", speculative)]
    assert ways["dflash"] == [plain, ("dspark fp32 speculative", speculative[:1])]
    assert ways["qwen3_target"] == [plain]


INSTALLED = any(one.name == "dspark-onnx" for one in distributions())


@pytest.mark.skipif(not INSTALLED, reason="the race tells dspark-onnx's version, and it is not installed here")
def test_a_race_without_peers(
    chat_bundle: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, prompts, output = chat_bundle("dspark_vanilla"), tmp_path / "class.jsonl", tmp_path / "race.json"
    texts = ["in the class", "a class", "tead"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    peers.main(tmp_path, [f"tiny={bundle}"], [prompts], 2, 12, 1, None, None, ["genai int4"], output)
    found = json.loads(output.read_text())
    rows = found["contestants"]
    assert [(row["name"], row["error"]) for row in rows] == [
        ("dspark tiny plain", None),
        ("dspark tiny speculative", None),
    ]
    model = DSparkInference.load(bundle, options=SpeculationOptions("off"), threads=1)
    done = model.generate(texts[:2], SamplingParams(max_new_tokens=12))
    assert found["settings"]["prompt_tokens"] == [one.prompt_tokens for one in done]
    for row in rows:
        assert [prompt["tokens"] for prompt in row["prompts"]] == [len(one.token_ids) for one in done]
        assert row["identical_outputs"] == 2
    assert found["not_installed"] == ["genai int4"]
    assert "dspark tiny speculative" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bundle", "only", "row", "message"),
    [
        ("no name", None, "{}", "--bundle no name: write NAME=BUNDLE"),
        ("tiny={}", ["genai"], "{}", "there is no peer 'genai'; there are 'genai fp32'"),
        ("tiny={}/absent", None, "{}", "absent"),
        ("tiny={}", None, '{"prompt": 3}', "class.jsonl: a row must have a prompt"),
    ],
)
def test_what_cannot_race_is_refused(
    bundle: str, only: list[str] | None, row: str, message: str, chat_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "class.jsonl"
    prompts.write_text(row)
    with pytest.raises(SystemExit, match=message):
        peers.main(tmp_path, [bundle.format(chat_bundle("dspark_vanilla"))], [prompts], only=only)
