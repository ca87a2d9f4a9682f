"""TensorRT for RTX builds real engines here: it needs no GPU for that."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from dspark.exporter.compile import Compilation
from dspark.exporter.errors import ExportError
from dspark.exporter.export import Export, export_bundle, prepare
from dspark.exporter.precision import Precision, PrecisionProfile
from dspark.providers import Choice, ProviderError
from dspark.providers.tensorrt.engine import TENSORRT_RTX, build_engine
from dspark.providers.tensorrt.profiles import Limits
from dspark.runtime import Bundle
from dspark.runtime.bundle.manifest import CacheForm
from tests.conftest import GOLDEN, ROOT

pytestmark = pytest.mark.providers
trt = pytest.importorskip("tensorrt_rtx")

TYPES = {"fp16": trt.DataType.HALF, "bf16": trt.DataType.BF16}


def planned(
    output: Path,
    precision: str,
    drafter: str | None = "dspark_gated",
    tables: str | None = None,
    cache_form: CacheForm = "in-place",
) -> Export:
    profile = PrecisionProfile.of(Precision(precision), Precision(tables) if tables else None)
    folder = drafter and GOLDEN / drafter
    return prepare(GOLDEN / "qwen3_target", folder, output, precision=profile, cache_form=cache_form)


def compiled(export: Export, batch_size: int = 4, sequence_length: int | None = None) -> dict[str, dict[str, Any]]:
    """Exports and compiles; returns the keys of the engines."""
    compilation = Compilation.of(Choice.parse("tensorrt-rtx"), export, batch_size, sequence_length)
    export_bundle(export, compile_graphs=compilation.run)
    folder = export.output / "engines" / "rtx"
    for file in folder.glob("*.json"):
        assert file.with_suffix(".engine").stat().st_size > 1000
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def layer_types(graph: Path) -> Counter[tuple[Any, Any]]:
    """How many layers of each kind and type of output a graph's network has."""
    model = ir.load(graph)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape(64 if size == "S" else size for size in value.shape or ())
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    assert parser.parse(ir.to_proto(model).SerializeToString(), str(graph))
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    return Counter((layer.type, layer.get_output(0).dtype) for layer in layers)


def assert_layers(export: Export, precision: str) -> None:
    """Linear layers have the precision, all other products are float32; caches are written by their own layer."""
    manifest = Bundle.open(export.output).manifest
    assert manifest.drafter is not None
    layers, draft_layers = manifest.target.cache.layers, manifest.drafter.cache.layers
    in_place = manifest.cache_form == "in-place"
    found = layer_types(export.output / "target.onnx")
    linear = 4 * layers + 1 + draft_layers  # four a layer; the drafter's fc, and keys and values of its layers
    attention = (2 if in_place else 4) * layers
    products = {dtype: count for (kind, dtype), count in found.items() if kind == trt.LayerType.MATRIX_MULTIPLY}
    assert products == {TYPES[precision]: linear, trt.DataType.FLOAT: attention + 1}
    updates = found[trt.LayerType.KV_CACHE_UPDATE, trt.DataType.FLOAT]
    assert updates == (2 * (layers + draft_layers) if in_place else 0)


@pytest.mark.parametrize("cache_form", ["in-place", "delta"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_all_graphs_of_a_dspark_bundle(precision: str, cache_form: CacheForm, tmp_path: Path) -> None:
    export = planned(tmp_path / "bundle", precision, cache_form=cache_form)
    keys = compiled(export)
    assert {name: list(key["profiles"]) for name, key in keys.items()} == {
        "target": ["decode", "verify", "prefill"],
        "drafter": ["draft"],
        "head": ["draft"],
    }
    for key in keys.values():
        assert key["layers"] > 0
        assert (key["precision"], key["backend"], key["version"]) == (precision, "tensorrt-rtx", trt.__version__)
    capacity = 576  # of a text of 512 tokens, the model's limit, an eighth or a draft more, in steps of 64
    assert keys["target"]["profiles"]["verify"] == {
        **{"B": [1, 1, 4], "T": [1, 6, 6], "S": [capacity if cache_form == "in-place" else 1, capacity, capacity]},
        **{"N": [1, 6, 24], "K": [1, 6, 24]},
    }
    assert_layers(export, precision)


def test_an_eagle3_bundle(tmp_path: Path) -> None:
    keys = compiled(planned(tmp_path / "bundle", "fp16", "eagle3"), batch_size=2, sequence_length=128)
    assert list(keys["drafter"]["profiles"]) == ["draft", "extension"]
    assert keys["drafter"]["profiles"]["extension"] == {"B": [1, 1, 2], "T": [1, 256, 256], "S": [1, 192, 192]}


def test_a_bundle_without_a_drafter(tmp_path: Path) -> None:
    keys = compiled(planned(tmp_path / "bundle", "bf16", None))
    assert list(keys) == ["target"]
    assert list(keys["target"]["profiles"]) == ["decode", "prefill"]


def test_weights_in_int8_with_tables_in_float16(tmp_path: Path) -> None:
    keys = compiled(planned(tmp_path / "bundle", "int8-weights", tables="fp16"))
    assert all(key["layers"] > 0 for key in keys.values())


@pytest.mark.parametrize(
    ("precision", "tables", "length", "message"),
    [
        ("int8", None, None, "tensorrt-rtx does not compile int8; choose one of bf16, fp16, fp32, int8-weights"),
        ("int8-weights", None, None, "cannot look tokens up in int8-weights tables; add --table-precision fp16"),
        ("fp16", None, 9999, "--max-sequence-length is 9999; the model's limit is 512"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_is_written(
    precision: str, tables: str | None, length: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        Compilation.of(Choice.parse("tensorrt-rtx"), planned(tmp_path / "bundle", precision, tables=tables), 4, length)
    assert not (tmp_path / "bundle").exists()


def test_a_graph_that_it_does_not_take_is_told(tmp_path: Path) -> None:
    export = planned(tmp_path / "bundle", "int8")
    export_bundle(export)
    limits = Limits(batch=1, draft_tokens=5, chunk=16, extension=16, capacity=64)
    graph = export.output / "head.onnx"
    with pytest.raises(ProviderError, match=r"head\.onnx: tensorrt-rtx cannot parse the graph: .*zero point"):
        build_engine(TENSORRT_RTX, graph, graph.read_bytes(), limits, "int8")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_smollm2(precision: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    profile = PrecisionProfile.of(Precision(precision))
    drafter = ROOT / "samples" / "smollm2" / "drafter"
    export = prepare(smollm2_gguf, drafter, tmp_path / "bundle", precision=profile)
    keys = compiled(export, batch_size=8)
    assert list(keys["target"]["profiles"]) == ["decode", "verify", "prefill"]
    assert keys["target"]["layers"] > 1000
    assert_layers(export, precision)
    assert (export.output / "engines" / "rtx" / "target.engine").stat().st_size > 250e6
