"""Serving profiles: what a file means, and how a wrong one is told."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from dspark.configs import serving_profiles
from dspark.runtime import Bundle, DSparkInference, RequestError, SamplingParams, SpeculationOptions
from dspark.runtime.engine.settings import EngineSettings
from dspark.runtime.loading.serving_profile import ServingProfile, ShortProfile, Verification, find_profile
from tests.support.command_line import Run
from tests.support.golden_models import PROMPTS, load

GoldenBundle = Callable[[str], Path]

FULL = """
verification:
  max_step_tokens: 48
  confidence_threshold: 0.25
  max_candidates: 2
scheduling:
  dynamic_batching: true
  min_batch_size: 4
  max_batch_size: 32
  max_queue_delay: 50ms
  prefill_tokens: 64
  max_cache_tokens: 9000
"""
SHORT = "draft_ratio: 0.5\nvalidation_batch: 24\nmax_sequence_len: 100\n"
OPEN = SpeculationOptions()


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a profile."""

    def write(text: str) -> Path:
        file = tmp_path / "mine.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def options(profile: ServingProfile, bundle: Path, given: SpeculationOptions = OPEN) -> SpeculationOptions:
    return profile.options(Bundle.open(bundle).manifest, given)


# --- what a profile means ---


def test_the_full_form(written: Callable[[str], Path], golden_bundle: GoldenBundle) -> None:
    profile = find_profile(written(FULL))
    assert profile.settings == EngineSettings(4, 0.05, prefill_tokens=64, step_tokens=48, cache_tokens=9000)
    assert (profile.batch_size, profile.max_sequence_length) == (32, None)
    assert options(profile, golden_bundle("dspark_vanilla")) == SpeculationOptions(None, 2, 0.25)
    assert options(profile, golden_bundle("eagle3")) == SpeculationOptions(None, 2)  # it has no confidence head
    assert options(profile, golden_bundle("qwen3_target")) == OPEN


def test_the_short_form(written: Callable[[str], Path], golden_bundle: GoldenBundle) -> None:
    profile = find_profile(written(SHORT))
    bundle = golden_bundle("dspark_vanilla")
    drafter = Bundle.open(bundle).manifest.drafter
    assert drafter is not None
    assert profile.settings == EngineSettings(step_tokens=24)
    assert (profile.batch_size, profile.max_sequence_length) == (None, 100)
    assert options(profile, bundle) == SpeculationOptions(max_draft_tokens=-(-drafter.draft_length // 2))
    assert options(profile, golden_bundle("qwen3_target")) == OPEN


@pytest.mark.parametrize(("ratio", "tokens"), [("0", None), ("0.01", 1), ("0.6", 3), ("0.61", 4), ("1", 5)])
def test_a_share_of_a_draft_is_rounded_up(
    ratio: str, tokens: int | None, written: Callable[[str], Path], golden_bundle: GoldenBundle
) -> None:
    bundle = golden_bundle("dspark_vanilla")
    drafter = Bundle.open(bundle).manifest.drafter
    assert drafter is not None
    expected = SpeculationOptions("off") if tokens is None else SpeculationOptions(max_draft_tokens=tokens)
    assert drafter.draft_length == 5
    assert options(find_profile(written(f"draft_ratio: {ratio}")), bundle) == expected


def test_a_share_that_is_whole_is_not_rounded_up(written: Callable[[str], Path], golden_bundle: GoldenBundle) -> None:
    manifest = Bundle.open(golden_bundle("dspark_vanilla")).manifest
    assert manifest.drafter is not None
    for length in range(1, 33):
        drafter = manifest.drafter.model_copy(update={"draft_length": length})
        of_that_length = manifest.model_copy(update={"drafter": drafter})
        for hundredths in range(1, 101):
            profile = ShortProfile(draft_ratio=hundredths / 100)
            assert profile.options(of_that_length, OPEN).max_draft_tokens == -(-hundredths * length // 100)


def test_what_is_left_out_binds_nothing(written: Callable[[str], Path], golden_bundle: GoldenBundle) -> None:
    for text in ("{}", "verification: {}", "scheduling: {}"):
        profile = find_profile(written(text))
        assert profile.settings == EngineSettings(prefill_tokens=128)
        assert options(profile, golden_bundle("dspark_vanilla")) == OPEN


def test_without_dynamic_batching_nobody_waits(written: Callable[[str], Path]) -> None:
    settings = find_profile(written(FULL.replace("true", "false"))).settings
    assert (settings.min_batch_size, settings.max_queue_delay) == (1, 0.0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0ms", 0.0), ("50ms", 0.05), ("1s", 1.0), ("0.5s", 0.5), ("10s", 10.0), ("1.5 ms", 0.0015)]
)
def test_durations(text: str, seconds: float, written: Callable[[str], Path]) -> None:
    profile = find_profile(written(f"scheduling: {{max_queue_delay: {text}}}"))
    assert profile.settings.max_queue_delay == pytest.approx(seconds)


@pytest.mark.parametrize("name", serving_profiles())
@pytest.mark.parametrize("bundle", ["dspark_vanilla", "dflash", "eagle3", "qwen3_target"])
def test_shipped_profiles_fit_every_bundle(name: str, bundle: str, golden_bundle: GoldenBundle) -> None:
    inference = DSparkInference.load(golden_bundle(bundle), threads=1, profile=name)
    expected = load(golden_bundle(bundle), 1, SpeculationOptions("off")).generate(PROMPTS[:3])
    assert [each.token_ids for each in inference.generate(PROMPTS[:3])] == [each.token_ids for each in expected]


def test_flash_is_for_latency_and_pro_for_throughput() -> None:
    flash, pro = find_profile("flash"), find_profile("pro")
    assert flash.settings.max_queue_delay == 0.0 < pro.settings.max_queue_delay
    assert (flash.settings.prefill_tokens or 0) < (pro.settings.prefill_tokens or 0)
    assert (flash.settings.step_tokens or 0) < (pro.settings.step_tokens or 0)
    assert (flash.batch_size or 0) < (pro.batch_size or 0)


# --- what goes before it ---


def test_given_options_go_before_the_profiles(written: Callable[[str], Path], golden_bundle: GoldenBundle) -> None:
    profile, bundle = find_profile(written(FULL)), golden_bundle("dspark_vanilla")
    assert options(profile, bundle, SpeculationOptions("threshold")) == SpeculationOptions("threshold", 2, 0.25)
    for given in (
        SpeculationOptions("fixed", 3),
        SpeculationOptions("off", 3),
        SpeculationOptions("threshold", 5, 0.9),
        SpeculationOptions(None, 5, 0.9),
    ):
        assert options(profile, bundle, given) == given


@pytest.mark.parametrize(
    "given", [OPEN, SpeculationOptions("fixed"), SpeculationOptions("hardware"), SpeculationOptions(None, None, 0.5)]
)
def test_a_share_of_nothing_decodes_plainly(
    given: SpeculationOptions, written: Callable[[str], Path], golden_bundle: GoldenBundle
) -> None:
    """Whatever the scheduler: it would choose among no tokens."""
    manifest = Bundle.open(golden_bundle("dspark_vanilla")).manifest
    profile = find_profile(written("draft_ratio: 0"))
    assert profile.options(manifest, given).resolve(manifest) is None
    drafting = replace(given, max_draft_tokens=2)
    assert profile.options(manifest, drafting) == drafting


def test_a_profile_does_not_limit_who_drafts_nothing(
    written: Callable[[str], Path], golden_bundle: GoldenBundle
) -> None:
    for text in (FULL, SHORT):
        assert options(find_profile(written(text)), golden_bundle("dspark_vanilla"), SpeculationOptions("off")) == (
            SpeculationOptions("off")
        )


def test_a_loaded_bundle_follows_its_profile(written: Callable[[str], Path], golden_bundle: GoldenBundle) -> None:
    bundle, file = golden_bundle("dspark_vanilla"), written(SHORT)
    inference = DSparkInference.load(bundle, threads=1, options=SpeculationOptions("fixed"), profile=file)
    assert inference.context_length == 100
    done = inference.generate([PROMPTS[0]], SamplingParams(max_new_tokens=30))[0]
    assert set(done.stats.draft_lengths[:-1]) == {3}
    with pytest.raises(RequestError, match="the limit is 100"):
        inference.generate([PROMPTS[0]], SamplingParams(max_new_tokens=100))
    longer = DSparkInference.load(bundle, threads=1, profile=file, max_sequence_length=200)
    assert longer.context_length == 200
    inference = DSparkInference.load(bundle, threads=1, profile=written(FULL.replace("9000", "64")))
    with pytest.raises(RequestError, match="the cache has room for 64"):
        inference.generate([PROMPTS[0]], SamplingParams(max_new_tokens=100))


# --- wrong profiles ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "verification: {maxsteptokens: 8}",
            "unknown key 'verification.maxsteptokens'; did you mean 'verification.max_step_tokens'?",
        ),
        ("scheduling: {max_queue_dealy: 1s}", "did you mean 'scheduling.max_queue_delay'?"),
        ("max_batch_size: 32", "unknown key 'max_batch_size'; did you mean 'scheduling.max_batch_size'?"),
        ("verification: {prefill_tokens: 32}", "did you mean 'scheduling.prefill_tokens'?"),
        ("schedulin: {}", "unknown key 'schedulin'; did you mean 'scheduling'?"),
        ("draft_ration: 0.5", "unknown key 'draft_ration'; did you mean 'draft_ratio'?"),
        ("draft_ratio: 0.5\nwhatever: 1", "unknown key 'whatever'; there are: verification, scheduling,"),
        ("1: 2", "unknown key '1'; there are:"),
        ("verification: {batch_size: 0}", "verification.max_step_tokens = 0: must be a whole number from 1 to 4096"),
        (
            "verification: {batch_size: 2.5}",
            "verification.max_step_tokens = 2.5: must be a whole number",
        ),
        ("verification: {confidence_threshold: 1.5}", "confidence_threshold = 1.5: must be a number from 0 to 1"),
        ("verification: {confidence_threshold: .nan}", "confidence_threshold = nan: must be a number from 0 to 1"),
        ("verification: {confidence_threshold: high}", "confidence_threshold = 'high': must be a number from 0 to 1"),
        ("verification: {max_candidates: 65}", "max_candidates = 65: must be a whole number from 1 to 64"),
        ("scheduling: {dynamic_batching: 1}", "scheduling.dynamic_batching = 1: must be true or false"),
        ("scheduling: {min_batch_size: 0}", "scheduling.min_batch_size = 0: must be a whole number from 1 to 256"),
        ("scheduling: {max_batch_size: 15}", "scheduling.max_batch_size = 15: must be a whole number from 16 to 256"),
        ("scheduling: {max_batch_size: 257}", "scheduling.max_batch_size = 257: must be a whole number from 16 to 256"),
        ("scheduling: {max_batch_size: true}", "scheduling.max_batch_size = True: must be a whole number"),
        ("scheduling: {prefill_tokens: 15}", "prefill_tokens = 15: must be a whole number from 16 to 8192"),
        ("scheduling: {max_cache_tokens: -1}", "max_cache_tokens = -1: must be a whole number from 16 to"),
        (
            "scheduling: {min_batch_size: 33, max_batch_size: 32}",
            "scheduling.min_batch_size = 33: must be at most max_batch_size, 32",
        ),
        ("scheduling: {min_batch_size: 17}", "scheduling.min_batch_size = 17: must be at most max_batch_size, 16"),
        *(
            (f"scheduling: {{max_queue_delay: {value}}}", f"max_queue_delay = {shown}: must be a duration such as 50ms")
            for value, shown in [
                *(("50", "50"), ("-5ms", "'-5ms'"), ("50us", "'50us'"), ("11s", "'11s'"), ("ms", "'ms'")),
                *(("1e3ms", "'1e3ms'"), ("null", "None"), (".inf", "inf")),
            ]
        ),
        ("verification: 3", "verification = 3: must be keys with values: max_step_tokens, confidence_threshold,"),
        ("scheduling:", "scheduling = None: must be keys with values: dynamic_batching,"),
        ("draft_ratio: -0.1", "draft_ratio = -0.1: must be a number from 0 to 1"),
        ("validation_batch: 0", "validation_batch = 0: must be a whole number from 1 to 4096"),
        ("max_sequence_len: 1", "max_sequence_len = 1: must be a whole number from 2 to"),
        (
            "draft_ratio: 1\nscheduling: {}",
            "has draft_ratio, scheduling; use verification and scheduling, or draft_ratio",
        ),
        ("[1, 2]", "must be keys with values, not [1, 2]"),
        ("a: [", "is not YAML"),
        ("a: !!python/object/apply:os.system [true]", "is not YAML"),
    ],
)
def test_a_wrong_profile_is_told(text: str, message: str, written: Callable[[str], Path]) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        find_profile(written(text))
    assert str(caught.value).startswith(f"profile {written(text)}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "verification: {batch_size: 2001-13-45}",
        "verification: {batch_size: 0x_}",
        "a: !!timestamp foo",
        "[" * 20_000,
        "draft_ratio: 0.5\ndraft_ratio: 0.6",
        "verification: {batch_size: 8, batch_size: 9}",
    ],
    ids=["date", "number", "timestamp", "deep", "repeated", "repeated in a section"],
)
def test_what_yaml_cannot_take_is_told(text: str, written: Callable[[str], Path]) -> None:
    with pytest.raises(RequestError, match=r"is not YAML: ."):
        find_profile(written(text))


def test_an_empty_profile_binds_nothing(written: Callable[[str], Path]) -> None:
    assert find_profile(written("")) == find_profile(written("{}"))


def test_all_that_is_wrong_is_told_at_once(written: Callable[[str], Path]) -> None:
    with pytest.raises(RequestError) as caught:
        find_profile(written("verification: {batch_size: 0, max_candidates: 0}\nscheduling: {max_batch: 1}"))
    for part in ("max_step_tokens = 0", "max_candidates = 0", "did you mean 'scheduling.max_batch_size'?"):
        assert part in str(caught.value)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"there is no profile 'flsh', and no \.yaml file; did you mean 'flash'\?$"):
        find_profile("flsh")
    with pytest.raises(RequestError, match=r"there is no profile 'mine', and no \.yaml file; there are: flash, pro$"):
        find_profile("mine")
    with pytest.raises(RequestError, match=r"none\.yaml: cannot be read"):
        find_profile(tmp_path / "none.yaml")
    (tmp_path / "latin.yml").write_bytes(b"a: \xff")
    with pytest.raises(RequestError, match=r"latin\.yml: cannot be read"):
        find_profile(tmp_path / "latin.yml")


# --- the command line ---


def test_profiles_on_the_command_line(run: Run, written: Callable[[str], Path], golden_bundle: GoldenBundle) -> None:
    bundle, file = golden_bundle("dspark_vanilla"), written(SHORT)
    arguments = (bundle, "--prompt", "tead ", "--max-new-tokens", "20", "--scheduler", "fixed", "--json")
    (row,) = run("generate", *arguments, "--profile", file).rows
    assert set(row["stats"]["draft_lengths"][:-1]) == {3}
    (row,) = run("generate", *arguments, "--profile", "flash", "--max-draft-tokens", "2").rows
    assert set(row["stats"]["draft_lengths"][:-1]) == {2}
    refused = run("generate", *arguments, "--profile", "flsh")
    assert refused.code == 1
    assert refused.error == "error: there is no profile 'flsh', and no .yaml file; did you mean 'flash'?\n"
    options = ("--scheduler", "fixed", "--max-new-tokens", "20", "--input", "-", "--json")
    measured = run("bench", bundle, "--profile", file, *options, stdin='{"prompt": "tead "}')
    assert json.loads(measured.out)["speculative"]["draft_lengths"].keys() <= {"0", "3"}


COMMANDS = [
    ("generate", "--prompt", "tead "),
    ("bench",),
    ("bench", "--profile-graph"),
    ("bench", "--load", "--concurrency", "1", "--requests-per-user", "1"),
]
"""Where ``--profile`` is taken, but for ``chat``, whose requests are those of ``generate``."""


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_command_follows_the_whole_profile(
    arguments: tuple[str, ...], run: Run, written: Callable[[str], Path], golden_bundle: GoldenBundle
) -> None:
    for text, told in (
        ("max_sequence_len: 24", "make 25; the limit is 24"),
        ("scheduling: {max_cache_tokens: 22}", "make 25; the cache has room for 22 (max_cache_tokens)"),
        ("max_sequence_len: 513", f"profile {written('')}: max_sequence_len is 513; this bundle allows 2 to 512"),
    ):
        options = ("--max-new-tokens", "20", "--profile", written(text))
        command, *flags = arguments
        if command == "bench":
            flags += ["--input", "-"]
        row = '{"prompt": "tead "}'
        result = run(command, golden_bundle("dspark_vanilla"), *flags, *options, stdin=row)
        assert (result.code, result.out.strip()) == (1, "")
        assert result.error.startswith("error: ")
        assert result.error.endswith(f"{told}\n")


def test_bench_shares_a_step_as_the_profile_says(
    run: Run, written: Callable[[str], Path], golden_bundle: GoldenBundle
) -> None:
    options = ("--scheduler", "fixed", "--max-new-tokens", "12", "--json")
    for budget, lengths in (("1", {"0"}), ("3", {"0", "2"})):
        file = written(f"validation_batch: {budget}")
        measured = run("bench", golden_bundle("dspark_vanilla"), "--profile", file, *options)
        assert json.loads(measured.out)["speculative"]["draft_lengths"].keys() == lengths


def test_no_scheduler_drafts_under_load_if_the_share_is_nothing(
    run: Run, written: Callable[[str], Path], golden_bundle: GoldenBundle
) -> None:
    options = ("--concurrency", "2", "--max-new-tokens", "8", "--confidence-threshold", "0.5", "--json")
    file = written("draft_ratio: 0")
    measured = run("bench", golden_bundle("dspark_vanilla"), "--load", "--profile", file, *options)
    cells = json.loads(measured.out)["cells"]
    assert len(cells) == 5
    assert {cell["verified_tokens"] for cell in cells} == {0.0}


@pytest.mark.parametrize("arguments", [*COMMANDS, ("chat",)], ids=" ".join)
def test_nobody_waits_where_nobody_else_can_come(
    arguments: tuple[str, ...], run: Run, written: Callable[[str], Path], chat_bundle: GoldenBundle
) -> None:
    patient = written("scheduling: {min_batch_size: 8, max_queue_delay: 10s}")
    options = ("--max-new-tokens", "4", "--profile", patient, "--max-draft-tokens", "1")
    command, *flags = arguments
    if command == "bench":
        flags += ["--input", "-"]
    stdin = "tead\n" if command == "chat" else '{"prompt": "tead "}'
    start = monotonic()
    assert run(command, chat_bundle("dspark_vanilla"), *flags, *options, stdin=stdin).code == 0
    assert monotonic() - start < 8


def test_priorities_on_the_command_line(run: Run, golden_bundle: GoldenBundle) -> None:
    rows = '{"prompt": "tead ", "priority": "batch"}\n{"prompt": "tead ", "priority": "later"}\n'
    arguments = ("--max-new-tokens", "8", "--scheduler", "fixed", "--json")
    done, refused = run("generate", golden_bundle("dspark_vanilla"), "--input", "-", *arguments, stdin=rows).rows
    assert done["text"] == "in the c"
    assert refused["error"] == "priority is 'later'; there are interactive and batch"


def test_the_former_name_of_a_steps_tokens() -> None:
    former = Verification.model_validate({"batch_size": 48})
    assert former == Verification.model_validate({"max_step_tokens": 48})
    assert former.max_step_tokens == 48


def test_both_names_at_once(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text("verification: {batch_size: 48, max_step_tokens: 64}")
    with pytest.raises(RequestError, match="batch_size: is the former name of max_step_tokens, which is there, too"):
        find_profile(file)
