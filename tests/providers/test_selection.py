"""What users write after ``--provider``, and which provider then runs which graph."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.exporter.export import export_bundle, prepare
from dspark.exporter.precision import Precision, PrecisionProfile
from dspark.providers import ON_CPU, ProviderError, Selection, find_provider
from dspark.runtime import Bundle, DSparkInference, SamplingParams
from dspark.runtime.loading.sessions import fitting_choices
from tests.runtime.command_line import Run, runner

GOLDEN = Path(__file__).parents[1] / "golden"
GoldenBundle = Callable[..., Path]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


def parsed(selection: Selection, graph: str) -> list[tuple[str, dict[str, str]]]:
    return [(choice.provider.name, dict(choice.options)) for choice in selection.choices(graph)]


def test_one_provider_for_all() -> None:
    selection = Selection.parse("OpenVINO:device_type=GPU,num_streams=2")
    for graph in ("target", "drafter", "head"):
        assert parsed(selection, graph) == [("openvino", {"device_type": "GPU", "num_streams": "2"})]
    assert not selection.allow_fallback


def test_one_provider_a_graph_and_the_cpu_for_the_rest() -> None:
    selection = Selection.parse(["target=qnn:htp_arch=73", "head=cpu"], allow_fallback=True)
    assert parsed(selection, "target") == [("qnn", {"htp_arch": "73"})]
    assert parsed(selection, "head") == parsed(selection, "drafter") == [("cpu", {})]
    assert selection.allow_fallback


def test_several_are_choices_in_this_order() -> None:
    selection = Selection.parse(["cuda", "target=cann", "openvino", "target=cpu"])
    assert [name for name, _ in parsed(selection, "target")] == ["cann", "cpu"]
    assert [name for name, _ in parsed(selection, "drafter")] == ["cuda", "openvino"]


def test_values_may_have_commas_colons_and_equals_signs() -> None:
    text = "nv-tensorrt-rtx:nv_profile_min_shapes=input_ids:1,pad_index:1x1,device_id=1"
    assert parsed(Selection.parse(text), "target") == [
        ("nv-tensorrt-rtx", {"nv_profile_min_shapes": "input_ids:1,pad_index:1x1", "device_id": "1"})
    ]
    assert parsed(Selection.parse('openvino:load_config={"CPU": "a=b"}'), "head")[0][1] == {
        "load_config": '{"CPU": "a=b"}'
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("openvno", r"Unknown provider 'openvno'; .* Did you mean 'openvino'\?"),
        ("targt=cpu", r"^targt=cpu: there is no graph 'targt'; .*head\. Did you mean 'target'\?"),
        ("openvino:GPU", r"^openvino:GPU: 'GPU' is no option; write openvino:key=value"),
        ("openvino:", r"'' is no option"),
        ("openvino:device_tpe=GPU", r"openvino has no option 'device_tpe'; .* Did you mean 'device_type'\?"),
        ("cpu:threads=3", r"cpu has no option 'threads'; it has: none\."),
        ("target=", r"Unknown provider ''"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ProviderError, match=message):
        Selection.parse(text)


def test_no_text_is_the_cpu() -> None:
    assert parsed(ON_CPU, "target") == parsed(Selection.parse([]), "target") == [("cpu", {})]


# --- bundles ---


def test_the_first_that_can_is_taken_and_the_others_are_told(
    golden_bundle: GoldenBundle, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = golden_bundle("dspark_vanilla", "delta")
    with caplog.at_level(logging.WARNING):
        model = DSparkInference.load(bundle, provider=["migraphx", "cann", "cuda", "cpu"], threads=1)
    told = " ".join(caplog.messages)
    assert "migraphx takes graphs of fixed shapes only" in told
    assert "cann takes graphs of fixed shapes only" in told
    assert "target: cuda is passed over: CUDAExecutionProvider is not in this ONNX Runtime" in told
    assert model.generate(["tead "], SamplingParams(max_new_tokens=12))[0].text == "in the class"


def test_a_provider_that_is_absent_is_refused_with_what_there_is(golden_bundle: GoldenBundle, run: Run) -> None:
    bundle = golden_bundle("dspark_vanilla")
    with pytest.raises(ProviderError, match=r"CUDAExecutionProvider is not in this ONNX Runtime \(.*CPUExecution"):
        DSparkInference.load(bundle, provider="cuda", threads=1)
    result = run("generate", bundle, "--prompt", "tead ", "--provider", "target=cpu", "--provider", "head=webgpu")
    assert result.code == 1
    assert "WebGpuExecutionProvider is not in this ONNX Runtime" in result.error
    assert "pip install onnxruntime onnxruntime-ep-webgpu" in " ".join(result.error.split())


@pytest.mark.parametrize(("bundle", "graph"), [("qwen3_target", "drafter"), ("eagle3", "head")])
def test_a_provider_for_a_graph_that_a_bundle_does_not_have_is_refused(
    bundle: str, graph: str, golden_bundle: GoldenBundle, run: Run
) -> None:
    result = run("generate", golden_bundle(bundle), "--prompt", "x", "--provider", f"{graph}=cpu")
    assert (result.code, result.out.strip()) == (1, "")
    assert f"error: the provider for {graph} would run nothing; this bundle's graphs are target" in result.error


def test_dynamic_shapes_are_refused_where_they_cannot_run(golden_bundle: GoldenBundle) -> None:
    with pytest.raises(ProviderError, match=r"qnn takes graphs of fixed shapes only, and .*: export with --static"):
        DSparkInference.load(golden_bundle("dspark_vanilla", "delta"), provider="qnn", threads=1)


def test_caches_written_in_place_are_refused_where_they_cannot_be(golden_bundle: GoldenBundle) -> None:
    with pytest.raises(ProviderError, match=r"openvino cannot write into the cache, .*: export with --cache-form"):
        DSparkInference.load(golden_bundle("dspark_vanilla", "in-place"), provider="openvino", threads=1)


def test_bf16_is_refused_on_the_cpu_with_what_to_use(tmp_path: Path) -> None:
    bf16 = PrecisionProfile.of(Precision.BF16)
    export_bundle(prepare(GOLDEN / "qwen3_target", None, tmp_path / "bf16", precision=bf16))
    with pytest.raises(ProviderError) as raised:
        DSparkInference.load(tmp_path / "bf16", provider="cpu", threads=1)
    message = str(raised.value)
    assert "cpu does not run bf16 (the target graph); it runs fp16, fp32, int4, int8, int8-blocks" in message
    assert "or run it with cuda or tensorrt or " in message
    chosen = fitting_choices(Bundle.open(tmp_path / "bf16"), Selection.parse(["cpu", "cuda"]), "target")
    assert [choice.provider.name for choice in chosen] == ["cuda"]


@pytest.mark.parametrize("command", ["generate", "bench", "profile", "evaluate", "calibrate", "compare"])
def test_every_command_takes_a_provider(command: str, golden_bundle: GoldenBundle, run: Run, tmp_path: Path) -> None:
    bundle, rows = golden_bundle("dspark_vanilla"), tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "tead "}\n')
    more = ["--reference", str(bundle)] if command == "compare" else []
    inputs = [] if command == "profile" else ["--input", str(rows), "--max-new-tokens", "4"]
    result = run(command, bundle, *inputs, *more, "--provider", "vitisai")
    assert result.code == 1
    assert "vitis-ai does not run fp32" in result.error


def test_inspect_shows_which_node_runs_where(golden_bundle: GoldenBundle, run: Run) -> None:
    bundle = golden_bundle("dspark_vanilla")
    placed = json.loads(run("inspect", bundle, "--placement", "--provider", "cpu", "--json").out)
    assert set(placed) == {"target", "drafter", "head"}
    names = {node["name"] for node in placed["target"]}
    assert any(name.startswith("layers.0/mlp/") for name in names)
    assert {node["provider"] for nodes in placed.values() for node in nodes} == {"CPUExecutionProvider"}
    table = run("inspect", bundle, "--placement").out
    assert "CPUExecutionProvider" in table
    assert "ArgMax 5" in table


def test_the_list_tells_what_is_there_and_why_others_are_not(run: Run) -> None:
    rows = {row["name"]: row for row in json.loads(run("providers", "--json").out)}
    cpu, cuda = rows["cpu"], rows["cuda"]
    assert cpu["usable"]
    assert cpu["problem"] is None
    assert cpu["devices"] == ["host"]
    assert cpu["precisions"] == sorted(find_provider("cpu").precisions)
    assert cpu["load"][0]["total_bytes"] > cpu["load"][0]["free_bytes"] > 0
    assert (rows["qnn"]["shapes"], cpu["shapes"]) == ("fixed", "any")
    assert not cuda["usable"]
    assert "pip install 'dspark-onnx[cuda]'" in cuda["problem"]
    table = run("providers").out
    assert "Not usable here" in table
    assert all(name in table for name in rows)
