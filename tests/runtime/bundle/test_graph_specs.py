"""The specification of graphs is what exported graphs declare and what the runtime binds, by name, type and shape."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from dspark.exporter.export import Static, export_bundle, prepare
from dspark.providers import Call, Session
from dspark.runtime import Bundle, DSparkInference, SamplingParams
from dspark.runtime.bundle.graph_specs import (
    DrafterFacts,
    GraphSpec,
    TargetFacts,
    TensorSpec,
    block_drafter_spec,
    eagle3_drafter_spec,
    graph_specs,
    head_spec,
    target_spec,
)
from dspark.runtime.bundle.manifest import CacheInfo
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.loaded import LoadedModel
from dspark.runtime.loading.serving import ServingOptions
from dspark.runtime.loading.sessions import open_sessions
from tests.support.golden_models import DRAFTERS, GOLDEN, PROMPTS, whole_drafts

FORMS = ["in-place", "delta", "static"]
BUNDLES = ["qwen3_target", "llama_target", *DRAFTERS, "speculators_dspark", "dspark_gated-top-k"]
Arrays = Mapping[str, NDArray[Any]]
MakeBundle = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> MakeBundle:
    """Exports a golden target or drafter in a form, once."""
    root = tmp_path_factory.mktemp("bundles")

    def bundle(name: str, form: str) -> Path:
        output = root / f"{name}-{form}"
        if not output.exists():
            folder, _, top_k = name.partition("-")
            target, drafter = (folder, None) if folder.endswith("_target") else ("qwen3_target", GOLDEN / folder)
            options: dict[str, Any] = {"draft_top_k": 8} if top_k else {}
            options["cache_form"] = "in-place" if form == "in-place" else "delta"
            options["static"] = Static(2, 16, (32, 64, 128)) if form == "static" else None
            export_bundle(prepare(GOLDEN / target, drafter, output, **options))
        return output

    return bundle


@pytest.fixture(params=BUNDLES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- what graphs declare ---


def declared(values: Any) -> tuple[TensorSpec, ...]:
    """Inputs or outputs of an ONNX graph."""
    return tuple(
        TensorSpec(
            value.name,
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
            tuple(each.dim_param or each.dim_value for each in value.type.tensor_type.shape.dim),
        )
        for value in values
    )


def test_exported_graphs_have_it(name: str, form: str, bundle: MakeBundle) -> None:
    opened = Bundle.open(bundle(name, form))
    specs = graph_specs(opened.manifest)
    assert specs.keys() == opened.manifest.precision.keys()
    for graph, spec in specs.items():
        model = onnx.load(opened.graph(graph), load_external_data=False).graph
        assert spec == GraphSpec(graph, declared(model.input), declared(model.output))
        assert model.name == graph


# --- what the runtime binds ---


class Bound:
    """A session that writes down the types and shapes of what is bound to it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.inputs: list[Arrays] = []
        self.outputs: list[Arrays] = []

    def bind(self, inputs: Arrays, outputs: Arrays) -> Call:
        self.inputs.append(inputs)
        self.outputs.append(outputs)
        return self._session.bind(inputs, outputs)


def assert_fits(spec: TensorSpec, array: NDArray[Any], sizes: dict[str, int]) -> None:
    """An array has a tensor's type and shape; ``sizes`` are the free dimensions so far, and may grow."""
    assert array.dtype == spec.dtype, spec.name
    assert array.ndim == len(spec.shape), spec.name
    for dimension, size in zip(spec.shape, array.shape, strict=True):
        expected = dimension if isinstance(dimension, int) else sizes.setdefault(dimension, size)
        assert size == expected, (spec, array.shape)


def test_the_runtime_binds_it(name: str, form: str, bundle: MakeBundle) -> None:
    """Whole prompts and rounds of requests that come and go; every input is bound, and over time every output."""
    opened = Bundle.open(bundle(name, form))
    sessions = open_sessions(opened, HostOptions(threads=1), list(opened.manifest.precision))
    bound = {graph: Bound(session) for graph, session in sessions.items()}
    use = ServingOptions(whole_drafts(opened), batch_size=2 if opened.manifest.shapes is None else None)
    model = DSparkInference(LoadedModel(opened, bound), use)  # type: ignore[arg-type]
    params = [SamplingParams(max_new_tokens=4 + 4 * i, temperature=float(i), seed=i) for i in range(3)]
    model.generate(PROMPTS[:3], params)
    for graph, spec in graph_specs(opened.manifest).items():
        inputs, outputs = ({each.name: each for each in side} for side in (spec.inputs, spec.outputs))
        assert len(bound[graph].inputs) > 1
        for given, wanted in zip(bound[graph].inputs, bound[graph].outputs, strict=True):
            assert given.keys() == inputs.keys()
            assert wanted.keys() <= outputs.keys()
            sizes: dict[str, int] = {}
            for tensors, arrays in ((inputs, given), (outputs, wanted)):
                for key, array in arrays.items():
                    assert_fits(tensors[key], array, sizes)
            if "S+T" in sizes:
                assert sizes["S+T"] == sizes["S"] + sizes["T"]
        assert {key for wanted in bound[graph].outputs for key in wanted} == outputs.keys()


# --- the tables of docs/reference/graphs.md, written out for small models ---

CACHE, DRAFT_CACHE = CacheInfo(layers=1, kv_heads=2, head_dim=8), CacheInfo(layers=1, kv_heads=3, head_dim=4)
BLOCK = DrafterFacts(True, DRAFT_CACHE, hidden_size=24, draft_length=5, choices=90, candidates=False, confidence=True)
TOP_K = DrafterFacts(True, DRAFT_CACHE, hidden_size=24, draft_length=5, choices=7, candidates=True, confidence=False)
EAGLE3 = DrafterFacts(
    False, DRAFT_CACHE, hidden_size=24, draft_length=4, choices=60, candidates=False, confidence=False
)
IN_PLACE, DELTA = TargetFacts("in-place", CACHE, 100, True), TargetFacts("delta", CACHE, 100, False)

FLAT = {"input_ids": ["N"], "position_ids": ["N"], "pad_index": ["B", "T"], "unpad_index": ["N"], "logits_index": ["K"]}
PAST = {"past.0.key": ["B", 2, "S", 8], "past.0.value": ["B", 2, "S", 8]}
PRESENT = {"present.0.key": ["B", 2, "S", 8], "present.0.value": ["B", 2, "S", 8]}
NEW = {"new.0.key": ["B", 2, "T", 8], "new.0.value": ["B", 2, "T", 8]}
CONTEXT = {"context.0.key": ["B", 3, "S", 4], "context.0.value": ["B", 3, "S", 4]}
PRESENT_CONTEXT = {"present.context.0.key": ["B", 3, "S", 4], "present.context.0.value": ["B", 3, "S", 4]}
NEW_CONTEXT = {"context.0.key": ["B", 3, "T", 4], "context.0.value": ["B", 3, "T", 4]}
SCORES = {"logits": ["K", 100], "choices": ["K"], "logit_sums": ["K"]}
EXTRA = {"rope_lengths": ["N"], "write_index": ["B"], "attention_bias": ["B", 1, 1, "T", "S"]}
DRAFTED = {"hidden": ["B", 5, 24], "base_logits": ["B", 5, 90]}
FEW = {"hidden": ["B", 5, 24], "base_logits": ["B", 5, 7], "candidates": ["B", 5, 7]}
RANDOM = {"uniform": ["B", 5], "temperature": ["B"]}
EXTENSION = {
    **{"input_ids": ["B", "T"], "features": ["B", "T", 24], "position_ids": ["B", "T"], "last_index": ["B"]},
    **{"attention_bias": ["B", 1, 1, "T", "S+T"], "uniform": ["B", 4], "temperature": ["B"]},
}
INTEGERS = {
    *("input_ids", "position_ids", "pad_index", "unpad_index", "logits_index", "rope_lengths", "write_index"),
    *("choices", "anchor_ids", "anchor_positions", "candidates", "draft_ids", "tokens", "last_index"),
}
ANCHORS = {"anchor_ids": ["B"], "anchor_positions": ["B"], "context_bias": ["B", 1, 1, 1, "S"]}
OWN_ROWS = {"new.0.key": ["B", 3, "T", 4], "new.0.value": ["B", 3, "T", 4]}
Shapes = Mapping[str, list[int | str]]

TABLE: dict[str, tuple[GraphSpec, Shapes, Shapes]] = {
    "target": (target_spec(IN_PLACE, None), FLAT | PAST | EXTRA, PRESENT | SCORES),
    "target-block": (
        target_spec(IN_PLACE, BLOCK),
        FLAT | PAST | EXTRA | CONTEXT,
        PRESENT | SCORES | PRESENT_CONTEXT,
    ),
    "target-eagle3": (target_spec(IN_PLACE, EAGLE3), FLAT | PAST | EXTRA, PRESENT | SCORES | {"feature": ["N", 24]}),
    "target-delta-block": (
        target_spec(DELTA, BLOCK),
        FLAT | PAST | {"attention_bias": ["B", 1, 1, "T", "S+T"]},
        NEW | NEW_CONTEXT | {"logits": ["K", 100]},
    ),
    "target-delta-eagle3": (
        target_spec(DELTA, EAGLE3),
        FLAT | PAST | {"attention_bias": ["B", 1, 1, "T", "S+T"]},
        NEW | {"feature": ["N", 24], "logits": ["K", 100]},
    ),
    "block": (block_drafter_spec(BLOCK), ANCHORS | CONTEXT, DRAFTED),
    "block-top-k": (block_drafter_spec(TOP_K), ANCHORS | CONTEXT, FEW),
    "head": (
        head_spec(BLOCK),
        DRAFTED | {"anchor_ids": ["B"]} | RANDOM,
        {"tokens": ["B", 5], "draft_logits": ["B", 5, 90], "confidence": ["B", 5]},
    ),
    "head-top-k": (
        head_spec(TOP_K),
        FEW | {"anchor_ids": ["B"]} | RANDOM,
        {"tokens": ["B", 5], "draft_logits": ["B", 5, 7], "draft_ids": ["B", 5, 7]},
    ),
    "eagle3": (
        eagle3_drafter_spec(EAGLE3),
        EXTENSION | CONTEXT,
        OWN_ROWS | {"tokens": ["B", 4], "draft_logits": ["B", 4, 60]},
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_table(case: str) -> None:
    spec, inputs, outputs = TABLE[case]
    for tensors, expected in ((spec.inputs, inputs), (spec.outputs, outputs)):
        assert {each.name: list(each.shape) for each in tensors} == expected
        assert len(tensors) == len(expected)
        assert {each.name for each in tensors if each.dtype == np.int64} == expected.keys() & INTEGERS
        assert {each.dtype for each in tensors} <= {np.dtype(np.int64), np.dtype(np.float32)}
