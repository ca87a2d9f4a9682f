"""The two forms of the target's cache: where new rows go, and what their tokens attend to."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from dspark.exporter.graphs.builder import GraphBuilder
from dspark.exporter.graphs.layers import KeyValue
from dspark.exporter.graphs.target_cache import CACHES, TargetCache
from dspark.exporter.weights import WeightFile
from dspark.runtime.bundle.graph_specs import DrafterFacts, GraphSpec, TargetFacts, TensorSpec, target_spec
from dspark.runtime.bundle.manifest import CacheForm, CacheInfo
from tests.exporter.graphs.recorded import Array, random

B, S, T = 2, 7, 3
TARGET, DRAFT = CacheInfo(layers=2, kv_heads=2, head_dim=4), CacheInfo(layers=1, kv_heads=1, head_dim=6)
BEGINS = np.array([4, 1])
QUERIES = BEGINS[:, None] + np.arange(T)
NEW = {f"own.{layer}.{part}": random(B, 2, T, 4, seed=layer) for layer, part in product(range(2), ("key", "value"))}
NEW |= {f"own.context.{part}": random(B, 1, T, 6, seed=9) for part in ("key", "value")}
CACHED = {f"past.{layer}.{part}": random(B, 2, S, 4, seed=layer) for layer, part in product(range(2), ("key", "value"))}
CONTEXT = {f"context.0.{part}": random(B, 1, S, 6, seed=7) for part in ("key", "value")}


def cached_rows(form: CacheForm) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Of a whole target's specification what concerns the cache."""
    target = TargetFacts(form, TARGET, 10, rope_lengths=False)
    drafter = DrafterFacts(True, DRAFT, 12, 3, 10, candidates=False, confidence=False)
    spec = target_spec(target, drafter)
    inputs = tuple(each for each in spec.inputs if "." in each.name or each.name in ("pad_index", "write_index"))
    return inputs, tuple(each for each in spec.outputs if "." in each.name)


@pytest.fixture(params=["in-place", "delta"])
def form(request: pytest.FixtureRequest) -> CacheForm:
    found: CacheForm = request.param
    return found


@pytest.fixture
def run(form: CacheForm, tmp_path: Path) -> Callable[[], dict[str, Array]]:
    """Takes new rows of all layers and returns all outputs, and what layer 1 attends to."""

    def run() -> dict[str, Array]:
        inputs, outputs = cached_rows(form)
        own = tuple(TensorSpec(name, array.dtype, array.shape) for name, array in NEW.items())
        queries = TensorSpec("queries", np.dtype(np.int64), (B, T))
        seen = S if form == "in-place" else S + T
        extra = [TensorSpec("keys", np.dtype(np.float32), (B, 2, seen, 4))]
        extra += [TensorSpec("distances", np.dtype(np.int64), (B, T, seen))]
        with WeightFile(tmp_path / "weights.bin", lambda count: None) as weights:
            g = GraphBuilder(GraphSpec("target", (*inputs, *own, queries), (*outputs, *extra)), weights)
            cache = CACHES[form](g, 2)
            record(g, cache)
            ir.save(g.model(), tmp_path / "target.onnx")
        session = onnxruntime.InferenceSession(str(tmp_path / "target.onnx"), providers=["CPUExecutionProvider"])
        feeds = NEW | CACHED | CONTEXT | {"write_index": BEGINS, "pad_index": np.zeros((B, T), np.int64)}
        feeds |= {"queries": QUERIES}
        names = [each.name for each in session.get_outputs()]
        wanted = {each.name: feeds[each.name] for each in session.get_inputs()}
        return dict(zip(names, session.run(names, wanted), strict=True))

    return run


def record(g: GraphBuilder, cache: TargetCache) -> None:
    def own(name: str) -> KeyValue:
        key, value = (g.op("Identity", g.input(f"own.{name}.{part}")) for part in ("key", "value"))
        return key, value

    for layer in range(2):
        parts = cache.extend(layer, own(str(layer)))
    keys = [key for key, _ in parts]
    g.output("keys", g.op("Concat", *keys, axis=2))
    g.output("distances", cache.distances(g.input("queries")))
    cache.keep_context(0, own("context"))
    g.input("pad_index")
    assert (cache.sizes is None) == (len(keys) == 1)


def written(cached: Array, own: Array) -> Array:
    """Each request's rows from its first new token on."""
    result = cached.copy()
    for request, begin in enumerate(BEGINS):
        result[request, :, begin : begin + T] = own[request]
    return result


def test_new_rows_are_written_at_their_place_or_returned(form: CacheForm, run: Callable[[], dict[str, Array]]) -> None:
    outputs = run()
    for layer, part in product(range(2), ("key", "value")):
        own = NEW[f"own.{layer}.{part}"]
        if form == "delta":
            assert np.array_equal(outputs[f"new.{layer}.{part}"], own)
        else:
            assert np.array_equal(outputs[f"present.{layer}.{part}"], written(CACHED[f"past.{layer}.{part}"], own))
    for part in ("key", "value"):
        own = NEW[f"own.context.{part}"]
        if form == "delta":
            assert np.array_equal(outputs[f"context.0.{part}"], own)
        else:
            assert np.array_equal(outputs[f"present.context.0.{part}"], written(CONTEXT[f"context.0.{part}"], own))


def test_tokens_attend_to_cached_and_new_rows(form: CacheForm, run: Callable[[], dict[str, Array]]) -> None:
    own, cached = NEW["own.1.key"], CACHED["past.1.key"]
    expected = np.concatenate([cached, own], axis=2) if form == "delta" else written(cached, own)
    assert np.array_equal(run()["keys"], expected)


def test_distances_are_from_where_keys_lie(form: CacheForm, run: Callable[[], dict[str, Array]]) -> None:
    keys = np.tile(np.arange(S), (B, 1))
    if form == "delta":
        keys = np.concatenate([keys, QUERIES], axis=1)
    assert np.array_equal(run()["distances"], QUERIES[:, :, None] - keys[:, None])


def test_only_the_form_in_place_needs_a_newer_opset(form: CacheForm, run: Callable[[], object], tmp_path: Path) -> None:
    run()
    assert ir.load(tmp_path / "target.onnx").graph.opset_imports[""] == (24 if form == "in-place" else 21)
