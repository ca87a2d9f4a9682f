"""The parity check passes on what the exporter makes, and fails on what it must not make."""

import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from dspark.exporter.checkpoints.description import HeadKind, Layer, Rope
from dspark.exporter.errors import ExportError, ParityError
from dspark.exporter.export import Export, export_bundle, prepare
from dspark.exporter.verify import Comparison, require_verify_dependencies, show_comparisons, verify_bundle
from tests.checkpoints import write_deepspec, write_eagle3, write_speculators, write_target, write_zlab_dflash

GOLDEN = Path(__file__).parents[1] / "golden"
TARGET = GOLDEN / "qwen3_target"

FLOAT32 = 1e-4
"""What float32 implementations differ by at most; the check itself allows ten times as much."""


@pytest.fixture(scope="module")
def reference() -> None:
    """What every comparison needs."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


def comparisons(planned: Export, source: Path) -> dict[str, Comparison]:
    return {item.what: item for item in verify_bundle(planned, planned.output, source)}


def exported(source: Path, drafter: Path | None, output: Path) -> dict[str, Comparison]:
    """Exports a bundle and checks it."""
    planned = prepare(source, drafter, output)
    export_bundle(planned)
    return comparisons(planned, source)


# What is right passes


@pytest.mark.parametrize("name", ["dspark_vanilla", "dspark_gated", "dflash", "speculators_dspark", "eagle3"])
def test_golden_drafters_agree_with_pytorch(name: str, reference: None, tmp_path: Path) -> None:
    found = exported(TARGET, GOLDEN / name, tmp_path / "bundle")
    expected = ["target: logits"]
    if name == "eagle3":
        expected += ["target: feature", "drafter: draft_logits", "drafter: tokens"]
    else:
        expected += [f"target: context.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
        expected += ["drafter: hidden", "drafter: base_logits", "head: draft_logits", "head: tokens"]
        expected += [] if name == "dflash" else ["head: confidence"]
    assert sorted(found) == sorted(expected)
    assert max(item.relative_error for item in found.values()) < FLOAT32
    assert max(item.absolute_error for item in found.values()) > 0


def test_a_plain_target_agrees_with_pytorch(reference: None, tmp_path: Path) -> None:
    found = exported(GOLDEN / "llama_target", None, tmp_path / "bundle")
    assert list(found) == ["target: logits"]
    assert found["target: logits"].relative_error < FLOAT32


def _mistral_window(folder: Path) -> tuple[Path, Path | None]:
    return write_target(folder / "target", "mistral", sliding_window=8, num_key_value_heads=1), None


def _qwen2_yarn(folder: Path) -> tuple[Path, Path | None]:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return write_target(folder / "target", "qwen2", rope_scaling=scaling, tie_word_embeddings=True), None


def _dynamic_rope(folder: Path) -> tuple[Path, Path]:
    """Both models scale their rotation for texts of more than 12 tokens."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    target = write_target(folder / "target", max_position_embeddings=12, rope_parameters=rope)
    return target, write_deepspec(folder / "drafter", target, rope_parameters=rope)


def _rnn_head(folder: Path) -> tuple[Path, Path]:
    target = write_target(folder / "target", attention_bias=True, mlp_bias=True)
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    drafter = write_deepspec(
        folder / "drafter", target, head="rnn", confidence="hidden", attention_bias=True, rope_parameters=rope
    )
    return target, drafter


def _causal_window(folder: Path) -> tuple[Path, Path]:
    """A block of which slot 0 proposes nothing, one layer causal within a window of 4."""
    target = write_target(folder / "target", "qwen3")
    kinds = ["sliding_attention", "full_attention"]
    return target, write_zlab_dflash(
        folder / "drafter", target, block_size=6, layer_types=kinds, sliding_window=4, use_sliding_window=True
    )


def _bidirectional_window(folder: Path) -> tuple[Path, Path]:
    """A reduced vocabulary, and a window of 3 to both sides."""
    target = write_target(folder / "target", "qwen3")
    window = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "use_sliding_window": True}
    return target, write_speculators(
        folder / "drafter", target, draft_vocab=40, backbone_changes=window, sliding_window_non_causal=True
    )


def _eagle3_norms(folder: Path) -> tuple[Path, Path]:
    target = write_target(folder / "target")
    return target, write_eagle3(folder / "drafter", target, draft_vocab=40, norm_before_residual=True, fc_norm=True)


def _eagle3_norm_before_fc(folder: Path) -> tuple[Path, Path]:
    target = write_target(folder / "target")
    return target, write_eagle3(folder / "drafter", target, norm_before_fc=True)


@pytest.mark.parametrize(
    "write",
    [
        _mistral_window,
        _qwen2_yarn,
        _dynamic_rope,
        _rnn_head,
        _causal_window,
        _bidirectional_window,
        _eagle3_norms,
        _eagle3_norm_before_fc,
    ],
)
def test_other_kinds_agree_with_pytorch(
    write: Callable[[Path], tuple[Path, Path | None]], reference: None, tmp_path: Path
) -> None:
    target, drafter = write(tmp_path)
    found = exported(target, drafter, tmp_path / "bundle")
    assert max(item.relative_error for item in found.values()) < FLOAT32


@pytest.mark.parametrize("divided", [False, True], ids=["default", "rope_freqs"])
def test_a_gguf_file_agrees_with_pytorch(divided: bool, reference: None, tmp_path: Path) -> None:
    """With ``rope_freqs.weight`` too, Llama 3's scaling, which transformers does not read."""
    pytest.importorskip("accelerate")
    divisors = np.linspace(1, 8, 8, dtype=np.float32) if divided else None
    file = _write_gguf(tmp_path / "model.gguf", GOLDEN / "llama_target", divisors)
    found = exported(file, None, tmp_path / "bundle")
    assert found["target: logits"].relative_error < FLOAT32


def _write_gguf(path: Path, folder: Path, rope_divisors: Any = None, window: int | None = None) -> Path:
    """The golden Llama target as llama.cpp's converter writes it: rows of Q and K interleaved."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(8)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(160)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    if window is not None:
        writer.add_sliding_window(window)
    writer.add_vocab_size(160)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([chr(0x100 + index) for index in range(160)])
    writer.add_token_types([gguf.TokenType.NORMAL] * 160)
    writer.add_token_merges([])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(tensor))
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# What is wrong fails, in the graph that is wrong

Damage = Callable[[Export], Export]


def _in(model: str, **changes: Any) -> Damage:
    """Changes a model's description."""
    return lambda export: replace(export, **{model: replace(getattr(export, model), **changes)})


def _in_layers(model: str, **changes: Any) -> Damage:
    """Changes the description of a model's layers."""
    return lambda export: _in(model, backbone=replace(getattr(export, model).backbone, **changes))(export)


CONTEXT = {f"target: context.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")}
OTHER_BASE = Rope(tuple(11000.0 ** -(index / 8) for index in range(8)))
VOCABULARY = 160

FAULTS: dict[str, tuple[str, Damage, set[str]]] = {
    "taps one layer later": ("dspark_vanilla", _in("drafter", taps=(1, 3, 5, 7)), CONTEXT),
    "one tap one layer earlier": ("eagle3", _in("drafter", taps=(0, 1, 3, 4, 6)), {"target: feature"}),
    "another rotation in the target": (
        "eagle3",
        _in_layers("target", rope=OTHER_BASE),
        {"target: logits", "target: feature"},
    ),
    "another rotation in a block drafter": (
        "dflash",
        _in_layers("drafter", rope=OTHER_BASE),
        {"target: context.0.key", "target: context.1.key", "drafter: hidden", "drafter: base_logits"},
    ),
    "another rotation in an EAGLE-3 drafter": (
        "eagle3",
        _in_layers("drafter", rope=OTHER_BASE),
        {"drafter: draft_logits"},
    ),
    "a window that hides one token": (
        "eagle3",
        _in_layers("target", layers=(Layer(window=16), *[Layer()] * 7)),
        {"target: logits", "target: feature"},
    ),
    "a causal block": (
        "dspark_gated",
        _in_layers("drafter", layers=(Layer(causal=True), Layer(causal=False))),
        {"drafter: hidden", "drafter: base_logits"},
    ),
    "another mask token": (
        "dspark_gated",
        _in("drafter", mask_token_id=129),
        {"drafter: hidden", "drafter: base_logits"},
    ),
    "another head": ("dspark_gated", _in("drafter", head=HeadKind.VANILLA), {"head: draft_logits"}),
    "the residual from the normed feature": (
        "eagle3",
        _in("drafter", norm_before_residual=True),
        {"drafter: draft_logits"},
    ),
    "draft ids moved by one": (
        "dspark_vanilla",
        _in("drafter", draft_vocabulary=np.roll(np.arange(VOCABULARY), 1)),
        {"head: tokens"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_bundle_fails(fault: str, reference: None, tmp_path: Path) -> None:
    name, damage, wrong = FAULTS[fault]
    right = prepare(TARGET, GOLDEN / name, tmp_path / "bundle")
    export_bundle(damage(right))
    found = comparisons(right, TARGET)
    failed = {what for what, item in found.items() if not item.ok}
    assert failed >= wrong
    assert failed - wrong <= {"head: tokens", "drafter: tokens"}  # other logits may have the same maximum
    with pytest.raises(ParityError):
        show_comparisons(list(found.values()), Console(file=io.StringIO()))


def test_a_window_that_only_longer_texts_reach_is_checked(reference: None, tmp_path: Path) -> None:
    source = write_target(tmp_path / "target", "mistral", sliding_window=64)
    right = prepare(source, None, tmp_path / "bundle")
    export_bundle(_in_layers("target", layers=(Layer(),) * 4)(right))
    assert not comparisons(right, source)["target: logits"].ok


def test_a_bundle_of_another_model_fails(reference: None, tmp_path: Path) -> None:
    planned = prepare(TARGET, None, tmp_path / "bundle")
    export_bundle(planned)
    other = write_target(tmp_path / "other", "qwen3", vocab_size=VOCABULARY, max_position_embeddings=512)
    assert not comparisons(planned, other)["target: logits"].ok


def test_a_graph_that_cannot_run_fails(reference: None, tmp_path: Path) -> None:
    right = prepare(TARGET, GOLDEN / "dflash", tmp_path / "bundle")
    export_bundle(_in("drafter", vocabulary_size=VOCABULARY - 1)(right))
    with pytest.raises(ParityError, match="cannot run the drafter graph"):
        comparisons(right, TARGET)


def test_a_reference_that_cannot_be_loaded_is_an_error(reference: None, tmp_path: Path) -> None:
    planned = prepare(TARGET, None, tmp_path / "bundle")
    export_bundle(planned)
    with pytest.raises(ExportError, match="nowhere: transformers cannot load it"):
        comparisons(planned, tmp_path / "nowhere")


def test_sliding_windows_in_a_gguf_file_are_refused(reference: None, tmp_path: Path) -> None:
    file = _write_gguf(tmp_path / "model.gguf", GOLDEN / "llama_target", window=8)
    pytest.importorskip("accelerate")
    with pytest.raises(ExportError, match="sliding windows"):
        exported(file, None, tmp_path / "bundle")


# How differences are judged and shown


@pytest.mark.parametrize(
    ("error", "ok"), [(0.0, True), (1e-3, True), (1.1e-3, False), (float("inf"), False), (float("nan"), False)]
)
def test_a_difference_is_allowed_up_to_the_tolerance(error: float, ok: bool) -> None:
    assert Comparison("head: tokens", 1.0, error, 1e-3).ok is ok


@pytest.mark.parametrize("worst", [0.5, float("inf"), float("nan")])
def test_the_table_comes_before_the_error_which_names_the_worst(worst: float) -> None:
    rows = [
        Comparison("target: logits", 1e-6, 1e-7),
        Comparison("drafter: hidden", 0.2, 0.2),
        Comparison("head: confidence", 3.0, worst),
    ]
    console = Console(file=(shown := io.StringIO()), width=100)
    with pytest.raises(ParityError, match=r"^head: confidence differs .* 0\.001 is allowed"):
        show_comparisons(rows, console)
    lines = shown.getvalue().splitlines()
    assert all(any(row.what in line for line in lines) for row in rows)
    show_comparisons(rows[:1], console)


@pytest.mark.parametrize(
    ("name", "source"), [("torch", "model"), ("transformers", "model"), ("accelerate", "model.gguf")]
)
def test_a_missing_package_names_the_extra(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ExportError, match=rf"{name}.*dspark-onnx\[verify\]"):
        require_verify_dependencies(Path(source))


def test_the_exporter_does_not_import_torch() -> None:
    code = (
        "import sys, dspark.exporter.verify, dspark.exporter.export\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'onnxruntime')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
