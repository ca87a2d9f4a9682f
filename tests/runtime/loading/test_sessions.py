"""Sessions are opened for the bundle's own graphs, by a provider that runs them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.runtime import Bundle, DSparkInference, ProviderError
from dspark.runtime.bundle.manifest import PrecisionInfo
from dspark.runtime.loading.host import HostOptions
from dspark.runtime.loading.sessions import open_sessions
from tests.support.bundle_editing import edit, void

GoldenBundle = Callable[[str], Path]


def sizes(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """Changes fields of the manifest, named ``target__cache__layers`` and so on."""

    def change(manifest: dict[str, Any]) -> None:
        for path, value in changes.items():
            *parents, name = path.split("__")
            place = manifest
            for parent in parents:
                place = place[parent]
            place[name] = value

    return change


CONTRADICTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "fewer layers": (
        "dspark_vanilla",
        sizes(target__cache__layers=7),
        "target.onnx: input past.7.key [B, 2, S, 16] is not given",
    ),
    "more layers": (
        "dspark_vanilla",
        sizes(target__cache__layers=9),
        "target.onnx: the graph has no input past.8.key",
    ),
    "heads": (
        "dspark_vanilla",
        sizes(target__cache__kv_heads=4),
        "target.onnx: input past.0.key has shape [B, 2, S, 16] in the graph and is called with [1, 4, 64, 16]",
    ),
    "vocabulary": (
        "qwen3_target",
        sizes(target__vocabulary_size=159),
        "target.onnx: output logits has shape [K, 160] in the graph and is called with [1, 159]",
    ),
    "rope lengths": (
        "qwen3_target",
        sizes(target__rope_lengths=True),
        "target.onnx: the graph has no input rope_lengths",
    ),
    "cache form": (
        "qwen3_target",
        sizes(cache_form="delta"),
        "target.onnx: the graph has no output new.0.key",
    ),
    "draft length": (
        "dspark_vanilla",
        sizes(drafter__draft_length=4),
        "drafter.onnx: output hidden has shape [B, 5, 64] in the graph and is called with [1, 4, 64]",
    ),
    "draft layers": (
        "dspark_vanilla",
        sizes(drafter__cache__head_dim=8),
        "target.onnx: input context.0.key has shape [B, 2, S, 16] in the graph and is called with [1, 2, 64, 8]",
    ),
    "top k": (
        "dspark_vanilla",
        sizes(drafter__top_k=3),
        "drafter.onnx: output base_logits has shape [B, 5, 160] in the graph and is called with [1, 5, 3]",
    ),
    "confidence": ("dflash", sizes(head__confidence="hidden"), "head.onnx: the graph has no output confidence"),
    "other graphs": (
        "dspark_vanilla",
        sizes(graphs__drafter="head.onnx", graphs__head="drafter.onnx"),
        "head.onnx: the graph has no input anchor_positions",
    ),
    "features": (
        "eagle3",
        sizes(drafter__hidden_size=32),
        "target.onnx: output feature has shape [N, 64] in the graph and is called with [1, 32]",
    ),
    "EAGLE-3's draft length": (
        "eagle3",
        sizes(drafter__draft_length=6),
        "drafter.onnx: input uniform has shape [B, 5] in the graph and is called with [1, 6]",
    ),
}


@pytest.mark.parametrize(("name", "change", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_manifest_that_describes_other_graphs_is_refused_when_it_is_loaded(
    name: str,
    change: Callable[[dict[str, Any]], object],
    message: str,
    golden_bundle: GoldenBundle,
    tmp_path: Path,
) -> None:
    path = shutil.copytree(golden_bundle(name), tmp_path / "bundle")
    edit(path, lambda manifest: void(change(manifest)))
    with pytest.raises(ProviderError) as raised:
        DSparkInference.load(path, threads=1)
    assert str(raised.value) == f"{path / message}; the bundle's manifest describes another graph"


def test_a_precision_that_the_provider_does_not_run(golden_bundle: GoldenBundle) -> None:
    bundle = Bundle.open(golden_bundle("dspark_vanilla"))
    for precision in (PrecisionInfo(linear="bf16", tables="fp32"), PrecisionInfo(linear="fp32", tables="bf16")):
        other = bundle.manifest.model_copy(update={"precision": {**bundle.manifest.precision, "drafter": precision}})
        with pytest.raises(ProviderError, match=r"cpu does not run bf16 \(the drafter graph\); it runs .*fp32"):
            open_sessions(Bundle(bundle.path, other), HostOptions(threads=1), ["target", "drafter", "head"])
