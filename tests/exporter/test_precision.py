"""Precisions: what a graph computes in each of them, what it holds, and what cannot be."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from dspark.exporter.errors import ExportError
from dspark.exporter.export import export_bundle, prepare
from dspark.exporter.packings import INT8, BlockPacking
from dspark.exporter.precision import Precision, PrecisionProfile
from dspark.providers import ProviderError
from dspark.runtime import Bundle, DSparkInference, SamplingParams, SpeculationOptions
from dspark.runtime.bundle.manifest import BlocksInfo, PrecisionInfo
from tests.checkpoints import edit, write_deepspec, write_eagle3, write_target
from tests.support.exported import assert_close
from tests.support.graph_host import Host, Request

Array = np.ndarray
TEXT = [5, 12, 19, 26, 33, 40, 50, 57, 64, 3, 10, 17]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
CPU_FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
needs_vnni = pytest.mark.skipif("vnni" not in CPU_FLAGS, reason="without VNNI, int4's kernels for one row are others")
# Root mean square of the logits' error, as a part of theirs.
ERRORS = {"fp16": 3e-3, "int8-weights": 0.06, "int8": 0.06, "int8-blocks": 0.06, "int4": 0.6}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target", tie_word_embeddings=True, **SIZES)


@pytest.fixture(scope="module")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Exports target and drafter in a precision, once."""
    root = tmp_path_factory.mktemp("bundles")
    drafter = write_deepspec(root / "drafter", target)

    def bundle(name: str) -> Path:
        if not (root / name).exists():
            profile = PrecisionProfile.of(Precision(name))
            export_bundle(prepare(target, drafter, root / name, precision=profile))
        return root / name

    return bundle


def logits_of(bundle: Path) -> Array:
    host = Host(bundle)
    return host.step([host.request(TEXT)], [len(TEXT)])[0][0]


@pytest.mark.parametrize("name", ERRORS)
def test_logits_are_near_those_in_fp32(name: str, bundle: Callable[[str], Path]) -> None:
    exact, found = logits_of(bundle("fp32")), logits_of(bundle(name))
    error = np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2))
    assert 0 < error < ERRORS[name]


@pytest.mark.parametrize("name", ["int8-weights", "int8-blocks", "int4"])
def test_nothing_but_the_weights_is_rounded(name: str, target: Path, tmp_path: Path) -> None:
    """The same as fp32 with weights that were rounded before."""
    precision = Precision(name)
    packing = {"int4": BlockPacking(4, 32), "int8-blocks": BlockPacking(8, 32)}.get(name, INT8)

    def round_weights(config: dict[str, Any], tensors: dict[str, Array]) -> None:
        for key, value in tensors.items():
            if "_proj." in key:
                tensors[key] = unpacked(name, *packing.pack(value))[:, : value.shape[1]].astype(np.float32)

    rounded = edit(Path(shutil.copytree(target, tmp_path / "rounded")), round_weights)
    profile = PrecisionProfile(precision, Precision.FP32, block_size=32, accuracy_level=1)
    export_bundle(prepare(target, None, tmp_path / "packed", precision=profile))
    export_bundle(prepare(rounded, None, tmp_path / "plain"))
    assert_close(logits_of(tmp_path / "packed"), logits_of(tmp_path / "plain"), 1e-5)


def unpacked(name: str, packed: Array, scales: Array) -> Array:
    """The rows that were packed in this precision, padded to whole blocks."""
    values = packed.astype(np.float64)
    if packed.dtype == np.uint8:  # in blocks
        if name == "int4":  # two values a byte
            values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1).astype(np.float64)
        values -= 8 if name == "int4" else 128
    values = values * scales.reshape(scales.shape + (1,) * (values.ndim - scales.ndim))
    return values.reshape(len(values), -1)


@pytest.mark.parametrize("name", ERRORS)
def test_generation_runs_and_speculation_changes_nothing(name: str, bundle: Callable[[str], Path]) -> None:
    """Verified alone or beside draft tokens, a token's logits lead to the same choice."""
    texts = [TEXT[:3], TEXT[:7], TEXT]
    params = SamplingParams(max_new_tokens=24)
    plain, speculative = (
        DSparkInference.load(bundle(name), threads=1, options=SpeculationOptions(scheduler)).generate(texts, params)
        for scheduler in ("off", "fixed")
    )
    assert [done.token_ids for done in speculative] == [done.token_ids for done in plain]
    assert any(any(done.stats.accepted_lengths) for done in speculative)


@pytest.mark.parametrize("name", ["int8", "int8-blocks", pytest.param("int4", marks=needs_vnni)])
def test_a_token_does_not_depend_on_its_neighbours(name: str, bundle: Callable[[str], Path]) -> None:
    """Not by one bit, however many requests are computed at once."""
    host = Host(bundle(name))
    texts = [[token] for token in TEXT]
    alone = [host.step([host.request(text)], [1], spare=1)[0][0] for text in texts]
    together = host.step([host.request(text) for text in texts], [1] * len(texts), spare=1)[0]
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "tolerance"), [("int8", 0), ("int8-blocks", 0), ("fp16", 1e-5), ("int8-weights", 1e-5), ("int4", 1e-5)]
)
def test_many_tokens_are_the_same_as_one_at_a_time(name: str, tolerance: float, bundle: Callable[[str], Path]) -> None:
    """A verification's logits and cache rows, in a cache as the runtime's: of one size, a multiple of 64."""
    host = Host(bundle(name))

    def step(request: Request, count: int) -> Array:
        return host.step([request], [count], spare=64 - request.length - count)[0][0]

    for count in range(2, 9):
        together, alone = host.request(TEXT), host.request(TEXT)
        for request in (together, alone):
            step(request, 4)
        logits = step(together, count)
        expected = np.concatenate([step(alone, 1) for _ in range(count)])
        for found, wanted in ((logits, expected), (together.rows, alone.rows)):
            assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("name", [*ERRORS, "bf16"])
def test_graphs_are_valid_and_smaller(name: str, bundle: Callable[[str], Path]) -> None:
    folder = bundle(name)
    for file in folder.glob("*.onnx"):
        model = onnx.load(file, load_external_data=False)
        onnx.checker.check_model(str(file))
        assert {each.domain for each in model.opset_import} <= {"", "com.microsoft"}
        for value in [*model.graph.input, *model.graph.output]:  # what the host sees is the same in all precisions
            assert value.type.tensor_type.elem_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64)
    sizes = [(bundle(each) / "weights.bin").stat().st_size for each in (name, "fp32")]
    share = {"fp16": 0.55, "bf16": 0.55, "int8": 0.4, "int8-weights": 0.36, "int8-blocks": 0.4, "int4": 0.36}[name]
    assert sizes[0] < share * sizes[1]


@pytest.mark.parametrize("name", ["fp32", *ERRORS, "bf16"])
def test_no_weight_is_lost(name: str, bundle: Callable[[str], Path]) -> None:
    """Every stored matrix has the norm of its source."""
    folder = bundle(name)
    source = stored_norms("fp32", onnx.load(bundle("fp32") / "target.onnx"))
    found = stored_norms(name, onnx.load(folder / "target.onnx"))
    found.pop("lm_head.weight", None)  # the tied table again, under the name that int8's product gives it
    assert found.keys() == source.keys()
    for key, norm in source.items():
        assert found[key] == pytest.approx(norm, rel=0.1 if name == "int4" else 0.01), key


def stored_norms(precision: str, model: onnx.ModelProto) -> dict[str, float]:
    """Norms of a graph's matrices, unpacked; rotations keep them."""
    arrays = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    norms = {}
    for name, array in arrays.items():
        if not name.endswith(".weight") or array.ndim < 2:
            continue
        scales = arrays.get(f"{name}.scale")
        values = array.astype(np.float64) if scales is None else unpacked(precision, array, scales)
        norms[name] = float(np.linalg.norm(values))
    return norms


@pytest.mark.parametrize("name", ["int8", "fp16", "int8-weights", "int8-blocks"])
def test_a_tied_table_is_stored_once(name: str, target: Path, tmp_path: Path) -> None:
    export_bundle(prepare(target, None, tmp_path / "bundle", precision=PrecisionProfile.of(Precision(name))))
    model = onnx.load(tmp_path / "bundle" / "target.onnx", load_external_data=False)
    tables = [each for each in model.graph.initializer if each.dims[:1] == [96] and np.prod(each.dims) == 96 * 64]
    places = {tuple((part.key, part.value) for part in each.external_data) for each in tables}
    assert len(places) == 1


# fp16


def test_values_beyond_float16_are_computed(target: Path, tmp_path: Path) -> None:
    """A residual stream of 1e5 and a drafter's fc output of 1e4 and more give what they give in fp32."""

    def enlarge(config: dict[str, Any], tensors: dict[str, Array]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] *= 3e4
        tensors["model.layers.0.mlp.up_proj.weight"] *= 30

    large = edit(Path(shutil.copytree(target, tmp_path / "large")), enlarge)
    drafter = write_eagle3(tmp_path / "drafter", large, taps=[0, 1, 2])
    results = {}
    for name in ("fp32", "fp16"):
        folder = tmp_path / name
        export_bundle(prepare(large, drafter, folder, precision=PrecisionProfile.of(Precision(name))))
        host = Host(folder)
        logits, features = host.step([host.request(TEXT)], [len(TEXT)])
        results[name] = logits[0], features[0]
    assert np.abs(results["fp32"][1]).max() > 65504, "the test must overflow float16"
    for exact, found in zip(results["fp32"], results["fp16"], strict=True):
        assert np.isfinite(found).all()
        assert np.abs(found - exact).max() < 0.01 * np.abs(exact).max()


def test_a_weight_that_float16_cannot_hold_is_named(target: Path, tmp_path: Path) -> None:
    def enlarge(config: dict[str, Any], tensors: dict[str, Array]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e5

    large = edit(Path(shutil.copytree(target, tmp_path / "large")), enlarge)
    planned = prepare(large, None, tmp_path / "bundles" / "bundle", precision=PrecisionProfile.of(Precision.FP16))
    with pytest.raises(
        ExportError, match=r"layers\.1\.mlp\.up_proj\.weight: has a weight of 100000, which float16 cannot hold"
    ):
        export_bundle(planned)
    assert not (tmp_path / "bundles").exists()


# What cannot be


def test_bf16_is_refused_on_the_cpu_by_name(bundle: Callable[[str], Path]) -> None:
    model = onnx.load(bundle("bf16") / "target.onnx", load_external_data=False)
    assert onnx.TensorProto.BFLOAT16 in {each.data_type for each in model.graph.initializer}
    with pytest.raises(ProviderError, match=r"cpu does not run bf16 \(the target graph\); it runs fp16, fp32, int4"):
        DSparkInference.load(bundle("bf16"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tables": Precision.INT4}, "cannot be int4"),
        ({"linear": Precision.INT4, "block_size": 48}, "block size is 48; it must be one of"),
        ({"linear": Precision.INT4, "accuracy_level": 5}, "accuracy level is 5; it must be one of"),
    ],
)
def test_profiles_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        PrecisionProfile(**arguments)


@pytest.mark.parametrize(
    ("linear", "tables", "size"),
    [
        (Precision.INT4, None, 32),
        (Precision.INT8_BLOCKS, None, 64),
        (Precision.FP16, Precision.INT8_BLOCKS, 64),
        (Precision.INT4, Precision.INT8_BLOCKS, 32),
        (Precision.INT8, None, None),
    ],
)
def test_blocks_that_nobody_chose(linear: Precision, tables: Precision | None, size: int | None) -> None:
    blocks = PrecisionProfile.of(linear, tables).blocks
    assert blocks == (None if size is None else BlocksInfo(size=size, accuracy_level=4))


# Manifest


def test_the_manifest_says_which(target: Path, tmp_path: Path) -> None:
    drafter = write_deepspec(tmp_path / "drafter", target)
    planned = prepare(
        target,
        drafter,
        tmp_path / "bundle",
        precision=PrecisionProfile.of(Precision.INT4, block_size=16, accuracy_level=1),
        draft_precision=PrecisionProfile.of(Precision.FP16, Precision.INT8),
    )
    export_bundle(planned)
    precision = Bundle.open(tmp_path / "bundle").manifest.precision
    assert precision["target"] == PrecisionInfo(
        linear="int4", tables="int8", blocks=BlocksInfo(size=16, accuracy_level=1)
    )
    assert precision["drafter"] == precision["head"] == PrecisionInfo(linear="fp16", tables="int8")
    assert str(precision["drafter"]) == "fp16 (embedding and LM head int8)"
    nodes = [
        node for node in onnx.load(tmp_path / "bundle" / "target.onnx").graph.node if node.op_type == "MatMulNBits"
    ]
    attributes = [{each.name: each.i for each in node.attribute} for node in nodes]
    assert {(each["block_size"], each["accuracy_level"], each["bits"]) for each in attributes} == {(16, 1, 4)}


def test_fc_and_confidences_are_not_rounded_to_whole_numbers(bundle: Callable[[str], Path]) -> None:
    for name in ("int8", "int4"):
        for graph, weight in (("target", "drafter.fc.weight"), ("head", "confidence_head.proj.weight")):
            model = onnx.load(bundle(name) / f"{graph}.onnx", load_external_data=False)
            (stored,) = [each for each in model.graph.initializer if each.name == weight]
            assert stored.data_type == onnx.TensorProto.FLOAT
