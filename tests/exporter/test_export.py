"""Bundles on disk: what is tapped, what is stored, what is refused, and what a failure leaves behind."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor
from safetensors.numpy import load_file

from dspark.exporter.checkpoints import read_target
from dspark.exporter.errors import CheckpointError, ExportError
from dspark.exporter.export import export_bundle, prepare
from dspark.exporter.packings import FLOAT32
from dspark.exporter.weights import WeightFile
from dspark.runtime import Bundle, BundleError, DSparkInference, SamplingParams
from dspark.runtime.bundle.manifest import MANIFEST, PrecisionInfo
from tests.checkpoints import edit, write_deepspec, write_eagle3, write_speculators, write_target, write_zlab_dflash
from tests.reference import ReferenceDrafter, ReferenceTarget
from tests.support.exported import Pair, Recorder, assert_close, assert_same_decoding, export
from tests.support.graph_host import MASKED, Host, open_graph

Array = NDArray[Any]

GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = np.random.default_rng(5).integers(0, 90, 40).tolist()
LAYERS = 6
JOINED = {
    ".qkv_proj": (".q_proj", ".k_proj", ".v_proj"),
    ".kv_proj": (".k_proj", ".v_proj"),
    ".gate_up_proj": (".gate_proj", ".up_proj"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("export") / "target", "qwen3", num_hidden_layers=LAYERS)


# Taps, positions, alignment


def feature_of(target: Path, tap: int, folder: Path) -> Array:
    """What the target's graph hands to an EAGLE-3 drafter whose ``fc`` changes nothing: the tap ``[n, H]`` itself."""

    def identity(config: dict[str, Any], tensors: dict[str, Array]) -> None:
        tensors["fc.weight"] = np.eye(32, dtype=np.float32)

    drafter = edit(write_eagle3(folder / "drafter", target, layout="legacy", taps=[tap]), identity)
    host = Host(export(target, drafter, folder / "bundle"))
    return host.step([host.request(TEXT)], [len(TEXT)])[1][0]


@pytest.mark.parametrize("tap", range(-1, LAYERS - 1))
def test_a_tap_is_the_output_of_its_layer(tap: int, target: Path, tmp_path: Path) -> None:
    states = ReferenceTarget(target).forward(TEXT)[1]
    feature = feature_of(target, tap, tmp_path)
    assert_close(feature, states[tap + 1])
    for other in {tap - 1, tap + 1} - {-2}:
        assert not np.allclose(feature, states[other + 1], rtol=1e-2)


def test_the_last_layer_is_refused(target: Path, tmp_path: Path) -> None:
    drafter = write_deepspec(tmp_path / "drafter", target, taps=[1, LAYERS - 1])
    with pytest.raises(CheckpointError, match=f"layer {LAYERS - 1}, the last"):
        prepare(target, drafter, tmp_path / "bundle")


LAYOUTS: dict[str, Callable[[Path, Path, list[int]], Path]] = {
    "deepspec": lambda folder, target, taps: write_deepspec(folder, target, taps=taps),
    "zlab": lambda folder, target, taps: write_zlab_dflash(folder, target, taps=taps),
    "speculators": lambda folder, target, taps: write_speculators(folder, target, taps=taps),
    "eagle3-speculators": lambda folder, target, taps: write_eagle3(folder, target, taps=taps, steps=5),
    "eagle3-legacy": lambda folder, target, taps: write_eagle3(folder, target, layout="legacy", taps=taps),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_taps_off_by_one_are_noticed(layout: str, target: Path, tmp_path: Path) -> None:
    """The comparison with the reference that all integration tests rest on fails for each neighbour."""
    reference = ReferenceTarget(target)
    true = ReferenceDrafter(LAYOUTS[layout](tmp_path / "true", target, [1, 2, 3]), reference, steps=5)
    for shift in (-1, 0, 1):
        folder = LAYOUTS[layout](tmp_path / str(shift), target, [tap + shift for tap in (1, 2, 3)])
        pair = Pair(Recorder(export(target, folder, tmp_path / f"{shift}.bundle")), reference, true)
        if shift == 0:
            assert_same_decoding(pair, [TEXT])
        else:
            with pytest.raises(AssertionError):
                assert_same_decoding(pair, [TEXT])


def test_the_anchor_stands_where_its_token_stands(golden_bundle: Callable[[str], Path]) -> None:
    """A trained drafter's first proposals are best at the anchor's own position."""
    bundle = golden_bundle("dspark_vanilla")
    host, drafter = Host(bundle), open_graph(bundle, "drafter")
    right = dict.fromkeys((-2, -1, 0, 1, 2), 0)
    for case in json.loads((GOLDEN / "dspark_vanilla" / "golden.json").read_text())["greedy"]:
        tokens, count = [*case["prompt"], *case["output"]], len(case["output"]) - 1
        _, (context,) = host.step([host.request(tokens)], [len(tokens)])
        anchors = np.arange(len(case["prompt"]), len(case["prompt"]) + count)
        hidden = np.arange(len(tokens)) >= anchors[:, None]
        feeds: dict[str, Array] = {
            "anchor_ids": np.array(tokens)[anchors],
            "context_bias": np.where(hidden, MASKED, 0)[:, None, None, None].astype(np.float32),
        }
        for index, rows in enumerate(context):
            name = f"context.{index // 2}.{('key', 'value')[index % 2]}"
            feeds[name] = np.ascontiguousarray(np.broadcast_to(rows, (count, *rows.shape)))
        for shift in right:
            logits = drafter.run(["base_logits"], feeds | {"anchor_positions": anchors + shift})[0]
            right[shift] += int((logits[:, 0].argmax(axis=-1) == np.array(tokens)[anchors + 1]).sum())
    assert right[0] > 1.2 * max(count for shift, count in right.items() if shift)


def oracle(config: dict[str, Any], tensors: dict[str, Array], embedding: Array, head: Array) -> None:
    """A drafter that knows its target: the logits of a slot are those of the target after the token before it."""
    tensors["fc.weight"] *= 0
    tensors["norm.weight"] *= 0  # base logits of zero: all comes from the sequential head
    tensors["markov_head.markov_w1.weight"] = embedding
    tensors["markov_head.markov_w2.weight"] = head
    rank = embedding.shape[1]
    match config["markov_head_type"]:
        case "gated":
            tensors["markov_head.gate_proj.weight"] *= 0
            tensors["markov_head.gate_proj.bias"] = np.full(rank, 30, np.float32)
        case "rnn":  # tanh of a small number is that number
            joint = np.zeros_like(tensors["markov_head.joint_proj.weight"])
            joint[2 * rank :, rank : 2 * rank] = 1e-3 * np.eye(rank)
            tensors["markov_head.joint_proj.weight"] = joint
            tensors["markov_head.joint_proj.bias"] *= 0


@pytest.mark.parametrize("anchor", [True, False])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_an_oracle_drafter_is_always_accepted(head: str, anchor: bool, tmp_path: Path) -> None:
    """One slot or one token off, and a drafter that knows the text would be no better than any other."""

    def blunt(config: dict[str, Any], tensors: dict[str, Array]) -> None:
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] *= 0  # what follows a token depends on the token alone, so the text repeats
        tensors["model.norm.weight"] = np.ones(32, np.float32)

    target = edit(write_target(tmp_path / "target"), blunt)
    own = load_file(target / "model.safetensors")
    tables = own["model.embed_tokens.weight"], own["lm_head.weight"]
    drafter = edit(
        write_speculators(
            tmp_path / "drafter", target, head=head, rank=32, block_size=5, confidence="none", sample_from_anchor=anchor
        ),
        lambda config, tensors: oracle(config, tensors, *tables),
    )
    graphs = Recorder(export(target, drafter, tmp_path / "bundle"))
    length = 5 if anchor else 4
    completion = graphs.model().generate([TEXT[:3]], SamplingParams(max_new_tokens=1 + 12 * (length + 1)))[0]
    assert completion.stats.accepted_lengths == [length] * 12
    assert completion.stats.acceptance_length == length + 1
    assert len(set(completion.token_ids)) < len(completion.token_ids)  # the text repeats


# Weights


def initializers(bundle: Path) -> dict[tuple[str, str], Array]:
    """The graphs' weights as ONNX reads them, by the checkpoint and the tensor they came from."""
    weights: dict[tuple[str, str], Array] = {}
    cache = Bundle.open(bundle).manifest.target.cache
    keys = cache.kv_heads * cache.head_dim
    for graph in sorted(bundle.glob("*.onnx")):
        for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                load_external_data_for_tensor(tensor, str(bundle))
                own = graph.stem == "target" and not tensor.name.startswith("drafter.")
                name, array = tensor.name.removeprefix("drafter."), numpy_helper.to_array(tensor)
                joined, parts = next(((each, JOINED[each]) for each in JOINED if each in name), ("", ("",)))
                equal = [array.shape[0] // len(parts)] * len(parts)
                sizes = [array.shape[0] - 2 * keys, keys, keys] if len(parts) == 3 else equal
                pieces = np.split(array, np.cumsum(sizes)[:-1])
                named = {name.replace(joined, part): piece for part, piece in zip(parts, pieces, strict=True)}
                weights.update({("target" if own else "drafter", each): value for each, value in named.items()})
    return weights


def parameters(tensors: Iterable[Array]) -> int:
    return sum(tensor.size for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_tensor_arrives(dtype: str, target: Path, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", "qwen3", num_hidden_layers=LAYERS, dtype=dtype, shards=2)
    drafter = write_deepspec(tmp_path / "drafter", folder, head="rnn", dtype=dtype)
    stored = initializers(export(folder, drafter, tmp_path / "bundle"))
    sources = {
        (owner, name.removeprefix("model.")): tensor
        for owner, source in (("target", folder), ("drafter", drafter))
        for name, tensor in tensors_of(source).items()
    }
    assert stored.keys() == sources.keys()
    for key, source in sources.items():
        assert stored[key].dtype == np.float32
        assert np.isclose(np.linalg.norm(stored[key]), np.linalg.norm(source.astype(np.float64)), rtol=1e-6)
        assert np.array_equal(stored[key], source.astype(np.float32))


def tensors_of(folder: Path) -> dict[str, Array]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_stored_once(tied: bool, tmp_path: Path) -> None:
    """Whether the configuration ties them or the file holds the same table twice."""
    target = write_target(tmp_path / "target", tie_word_embeddings=tied, vocab_size=2048)
    if not tied:
        edit(target, lambda config, tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    tensors = tensors_of(target)
    tensors.pop("lm_head.weight", None)
    bundle = export(target, None, tmp_path / "bundle")
    assert (bundle / "weights.bin").stat().st_size <= parameters(tensors.values()) * 4 * 1.02
    assert not any((bundle / "target.onnx").read_bytes().count(name) for name in (b"lm_head.weight",))


@pytest.mark.parametrize("tied", [True, False])
def test_a_drafters_copy_of_the_targets_tables_is_not_stored(tied: bool, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", tie_word_embeddings=tied, vocab_size=2048, dtype="bfloat16")
    tables = tensors_of(target)
    embedding = tables["model.embed_tokens.weight"]
    copies = {"embed_tokens.weight": embedding, "lm_head.weight": tables.get("lm_head.weight", embedding)}
    drafter = edit(
        write_deepspec(tmp_path / "drafter", target, dtype="bfloat16"), lambda config, tensors: tensors.update(copies)
    )
    own = {name: tensor for name, tensor in tensors_of(drafter).items() if name not in copies}
    pair = Pair.make(target, drafter, tmp_path / "bundle")
    bundle = pair.graphs.bundle.path
    limit = parameters([*tables.values(), *own.values()]) * 4 * 1.02
    assert (bundle / "weights.bin").stat().st_size <= limit
    assert_same_decoding(pair, [TEXT])


def test_tables_that_differ_are_both_stored(target: Path, tmp_path: Path) -> None:
    drafter = write_deepspec(tmp_path / "drafter", target)
    bundle = export(target, drafter, tmp_path / "bundle")
    every = parameters([*tensors_of(target).values(), *tensors_of(drafter).values()])
    assert (bundle / "weights.bin").stat().st_size >= every * 4


KINDS: dict[str, Callable[[Path, Path], Path | None]] = {
    "plain": lambda folder, target: None,
    "deepspec": lambda folder, target: write_deepspec(folder, target, head="rnn"),
    "zlab": lambda folder, target: write_zlab_dflash(folder, target),
    "speculators": lambda folder, target: write_speculators(folder, target, draft_vocab=60, head="gated"),
    "eagle3": lambda folder, target: write_eagle3(folder, target, draft_vocab=60, fc_norm=True),
}


@pytest.fixture(scope="module", params=KINDS)
def bundle(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return export(target, KINDS[request.param](folder / "drafter", target), folder / "bundle")


def test_graphs_are_valid_and_hold_no_weights(bundle: Path) -> None:
    """Weights lie outside at any size, so no graph can come near the 2 GB that protobuf allows."""
    graphs = sorted(bundle.glob("*.onnx"))
    assert {graph.stem for graph in graphs} == set(Bundle.open(bundle).manifest.precision)
    for graph in graphs:
        onnx.checker.check_model(str(graph), full_check=True)
        model = onnx.load(graph, load_external_data=False)
        assert {domain.domain for domain in model.opset_import} == {""}
        for tensor in model.graph.initializer:
            external = tensor.data_location == TensorProto.EXTERNAL
            assert external or tensor.ByteSize() < 4096
            if external:
                places = {entry.key: entry.value for entry in tensor.external_data}
                assert places["location"] == "weights.bin"
                assert int(places["offset"]) % 64 == 0
        assert all(node.name for node in model.graph.node)


def test_a_bundle_can_be_moved(bundle: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(bundle, moved)
    outputs = [
        DSparkInference.load(folder, threads=1, check_hashes=True).generate([TEXT], SamplingParams(max_new_tokens=6))
        for folder in (bundle, moved)
    ]
    assert outputs[0][0].token_ids == outputs[1][0].token_ids


# Manifest


def test_the_manifest_describes_the_checkpoints(tmp_path: Path) -> None:
    target = write_target(
        tmp_path / "target",
        "qwen2",
        eos_token_id=[94, 3],
        generation_config={"eos_token_id": [7, 94]},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        shards=2,
    )
    drafter = write_speculators(
        tmp_path / "drafter", target, draft_vocab=60, head="gated", sample_from_anchor=False, taps=[-1, 2]
    )
    manifest = export_bundle(prepare(target, drafter, tmp_path / "bundle"))
    opened = Bundle.open(tmp_path / "bundle", check_hashes=True)
    assert opened.manifest == manifest
    described = manifest.target
    assert (described.family, described.name, described.vocabulary_size, described.hidden_size) == (
        "qwen2",
        "target",
        96,
        32,
    )
    assert (described.context_length, described.rope_lengths, described.stop_token_ids) == (512, True, (3, 7, 94))
    assert described.cache.model_dump() == {"layers": 4, "kv_heads": 2, "head_dim": 8}
    own = manifest.drafter
    assert own is not None
    assert own.cache.model_dump() == {"layers": 2, "kv_heads": 2, "head_dim": 16}
    assert (own.kind, own.layout, own.taps, own.mask_token_id) == ("dspark", "speculators", (-1, 2), 95)
    assert (own.block_size, own.anchor_predicts, own.draft_length, own.vocabulary_size) == (5, False, 4, 60)
    assert manifest.head is not None
    assert manifest.head.model_dump() == {"kind": "gated", "markov_rank": 16, "confidence": "hidden_and_markov"}
    assert manifest.precision == dict.fromkeys(
        ["target", "drafter", "head"], PrecisionInfo(linear="fp32", tables="fp32")
    )
    assert {"dspark-onnx", "onnx-ir"} <= manifest.producer.keys()
    for info, folder in ((described, target), (own, drafter)):
        files = sorted(folder.glob("*.safetensors"))
        assert [source.name for source in info.source] == [file.name for file in files]
        assert [source.sha256 for source in info.source] == [sha256(file) for file in files]
    present = {file.name for file in (tmp_path / "bundle").iterdir()}
    assert present == {*manifest.files, "manifest.json"}
    for name, info in manifest.files.items():
        file = tmp_path / "bundle" / name
        assert (info.bytes, info.sha256) == (file.stat().st_size, sha256(file))
    vocabulary = opened.draft_vocabulary()
    assert vocabulary is not None
    assert vocabulary.tolist() == tensors_of(drafter)["t2d"].nonzero()[0].tolist()


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_text_files_come_along(golden_bundle: Callable[[str], Path]) -> None:
    folder, bundle = GOLDEN / "qwen3_target", Bundle.open(golden_bundle("qwen3_target"))
    assert bundle.manifest.text.tokenizer == "tokenizer.json"
    assert json.loads(bundle.text("tokenizer.json")) == json.loads((folder / "tokenizer.json").read_text())


# Damaged bundles


@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "edited"])
def test_a_damaged_file_is_named(damage: str, golden_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    whole = golden_bundle("dspark_vanilla")
    for name in Bundle.open(whole).manifest.files:
        broken = tmp_path / name
        shutil.copytree(whole, broken)
        file = broken / name
        content = bytearray(file.read_bytes())
        match damage:
            case "missing":
                file.unlink()
            case "truncated":
                file.write_bytes(content[:-1])
            case "longer":
                file.write_bytes(content + b"\0")
            case "edited":
                content[len(content) // 2] ^= 1
                file.write_bytes(content)
        with pytest.raises(BundleError, match=re.escape(str(file))):
            DSparkInference.load(broken, threads=1)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_weights_that_are_not_finite_are_refused(value: float, target: Path, tmp_path: Path) -> None:
    def spoil(config: dict[str, Any], tensors: dict[str, Array]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3] = value

    broken = edit(Path(shutil.copytree(target, tmp_path / "broken")), spoil)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight: has values that are not finite"):
        export(broken, None, tmp_path / "bundles" / "bundle")
    assert not (tmp_path / "bundles").exists()


def test_weights_that_overflow_are_told(target: Path, tmp_path: Path) -> None:
    """A target that computes what is no number ends a request with an error instead of text."""

    def overflow(config: dict[str, Any], tensors: dict[str, Array]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][:] = np.finfo(np.float32).max

    broken = edit(Path(shutil.copytree(target, tmp_path / "broken")), overflow)
    drafter = write_deepspec(tmp_path / "drafter", target)
    model = Recorder(export(broken, drafter, tmp_path / "bundle")).model()
    completion = model.generate([TEXT], SamplingParams(max_new_tokens=4))[0]
    assert (completion.finish_reason, completion.token_ids) == ("error", [])
    assert completion.error is not None


# Outputs: whole or not at all


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_an_output_that_exists_is_refused(target: Path, tmp_path: Path) -> None:
    output = export(target, None, tmp_path / "bundle")
    before = content(tmp_path)
    with pytest.raises(ExportError, match=r"bundle: exists already; .* --force"):
        prepare(target, None, output)
    assert content(tmp_path) == before


def test_force_replaces_a_bundle(target: Path, tmp_path: Path) -> None:
    output = export(target, write_deepspec(tmp_path / "drafter", target), tmp_path / "bundle")
    (output / "stale.txt").write_text("of the old bundle")
    export_bundle(prepare(target, None, output, force=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "drafter"]
    assert Bundle.open(output).manifest.drafter is None
    assert not {"stale.txt", "drafter.onnx"} & content(output).keys()


def test_force_replaces_only_bundles(target: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    (tmp_path / "file").write_text("a file")
    for name, reason in (("photos", "holds files but no bundle"), ("file", "exists and is no folder")):
        with pytest.raises(ExportError, match=f"{name}: {reason}"):
            prepare(target, None, tmp_path / name, force=True)
    assert content(tmp_path) == {"photos/cat.jpg": b"meow", "file": b"a file"}


def test_an_empty_folder_is_filled(target: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    assert Bundle.open(export(target, None, tmp_path / "bundle"))


def test_missing_parents_are_made(target: Path, tmp_path: Path) -> None:
    assert Bundle.open(export(target, None, tmp_path / "a" / "b" / "bundle"))


FAILURES = [KeyboardInterrupt(), RuntimeError("a bug"), OSError(28, "No space left on device")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("existing", ["nothing", "empty", "bundle"])
@pytest.mark.parametrize("moment", ["first bytes", "last bytes", "graph", "hash", "exchange"])
def test_a_failure_leaves_nothing_behind(
    moment: str, existing: str, failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, output = GOLDEN / "llama_target", tmp_path / "a" / "b" / "bundle"
    if existing == "bundle":
        export(target, None, output)
    elif existing == "empty":
        output.mkdir(parents=True)
    before = content(tmp_path)
    planned = prepare(target, None, output, force=existing == "bundle")
    written = failed = 0

    def on_bytes(count: int) -> None:
        nonlocal written
        written += count
        if moment == "first bytes" or (moment == "last bytes" and written == planned.weight_bytes):
            raise failure

    def fail(*arguments: object) -> None:
        raise failure

    rename = Path.rename

    def rename_once(path: Path, other: Path) -> Path:
        nonlocal failed
        if not failed and (path.name == "bundle" or (path.name == MANIFEST and path.parent != output)):
            failed += 1
            raise failure
        return rename(path, other)

    match moment:
        case "graph":
            monkeypatch.setattr(ir, "save", fail)
        case "hash":
            monkeypatch.setattr("dspark.exporter.export.hash_file", fail)
        case "exchange":
            monkeypatch.setattr(Path, "rename", rename_once)
    expected = ExportError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected) as caught:
        export_bundle(planned, on_bytes)
    if isinstance(failure, OSError):
        assert "No space left on device" in str(caught.value)
    assert content(tmp_path) == before
    assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == ["a", "b", "bundle"] * (
        existing != "nothing"
    )


def test_parents_that_somebody_else_uses_stay(target: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()

    def fail(count: int) -> None:
        (tmp_path / "mine" / "new" / "theirs").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_bundle(prepare(target, None, tmp_path / "mine" / "new" / "empty" / "bundle"), fail)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "mine",
        "mine/new",
        "mine/new/theirs",
    ]


@pytest.mark.parametrize("existing", [False, True])
def test_a_folder_that_cannot_be_replaced_is_filled(
    existing: bool, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount point or the working folder: the folder itself stays, and what is beside it is never touched."""
    parent = tmp_path / "parent"
    (parent / "volume").mkdir(parents=True)
    monkeypatch.chdir(parent / "volume")
    if existing:
        export(GOLDEN / "qwen3_target", None, Path())
    inode, order = Path().stat().st_ino, []
    rename = Path.rename

    def rename_within(path: Path, other: Path) -> Path:
        assert path != parent / "volume", "the device is busy"
        order.append(path.name)
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", rename_within)
    parent.chmod(0o555)
    try:
        export(target, None, Path(), force=existing)
    finally:
        parent.chmod(0o755)
    assert Path().stat().st_ino == inode
    assert Bundle.open(Path()).manifest.target.name == target.name
    assert order[-1] == MANIFEST
    assert not existing or order[0] == MANIFEST
    assert {path.name for path in Path().iterdir()} == {MANIFEST, *Bundle.open(Path()).manifest.files}


def cut(name: str) -> Callable[[dict[str, Any], dict[str, Array]], None]:
    return lambda config, tensors: tensors.update({name: tensors[name][..., :-1].copy()})


def setting(**values: Any) -> Callable[[dict[str, Any], dict[str, Array]], None]:
    return lambda config, tensors: config.update(values)


REFUSED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Array]], None], str]] = {
    "no mask token": (lambda config, tensors: config.pop("mask_token_id"), "mask_token_id"),
    "mask token outside": (setting(mask_token_id=96), "mask_token_id = 96"),
    "last tap": (setting(target_layer_ids=[0, 1, 5]), "layer 5, the last"),
    "tap outside": (setting(target_layer_ids=[0, 1, 6]), "layer 6 is out of range"),
    "falling taps": (setting(target_layer_ids=[0, 2, 1]), "increasing"),
    "fc width": (cut("fc.weight"), "fc.weight"),
    "depth of the target": (setting(num_target_layers=7), "num_target_layers = 7"),
    "width of the target": (setting(hidden_size=48), "hidden_size = 48"),
    "vocabulary of the target": (setting(vocab_size=97), "vocab_size = 97"),
    "confidence without Markov": (setting(markov_rank=0), "confidence_head_with_markov"),
    "reduced without d2t": (setting(draft_vocab_size=60), "d2t"),
    "architecture": (setting(architectures=["NoSuchModel"]), "NoSuchModel"),
    "rope type": (setting(rope_parameters={"rope_type": "spiral"}), "spiral"),
    "bundled": (lambda config, tensors: tensors.update({"mtp.0.weight": np.ones(1, np.float32)}), "mtp.0"),
    "softcapping": (setting(final_logit_softcapping=30.0), "final_logit_softcapping = 30.0"),
    "output multiplier": (setting(output_multiplier=0.5), "output_multiplier = 0.5"),
    "embedding scale": (setting(input_embedding_scale=2.0), "input_embedding_scale = 2.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_written(case: str, target: Path, tmp_path: Path) -> None:
    change, named = REFUSED[case]
    drafter = edit(write_deepspec(tmp_path / "drafter", target), change)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        prepare(target, drafter, tmp_path / "outputs" / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_pickle_is_refused(target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(target, tmp_path / "pickled"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        prepare(folder, None, tmp_path / "bundle")


# Streaming


def test_a_tensor_is_stored_once_however_often_it_is_asked_for(target: Path, tmp_path: Path) -> None:
    tensors = read_target(target).tensors
    seen: list[int] = []
    with WeightFile(tmp_path / "weights.bin", seen.append) as weights:
        (first,) = weights.add(tensors["embed_tokens.weight"], FLOAT32)
        assert weights.add(tensors["embed_tokens.weight"], FLOAT32)[0] is first
        (other,) = weights.add(tensors["lm_head.weight"], FLOAT32)
    assert other is not first
    assert sum(seen) == first.nbytes + other.nbytes  # type: ignore[operator]
    assert (tmp_path / "weights.bin").stat().st_size == first.nbytes + other.nbytes  # type: ignore[operator]


def test_the_progress_adds_up(tmp_path: Path, target: Path) -> None:
    planned = prepare(target, write_deepspec(tmp_path / "drafter", target), tmp_path / "bundle")
    seen: list[int] = []
    export_bundle(planned, seen.append)
    assert sum(seen) == planned.weight_bytes


MEASURE = """
import re, sys
from pathlib import Path
from dspark.exporter.export import export_bundle, prepare
export_bundle(prepare(Path(sys.argv[1]), None, Path(sys.argv[2])))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))
"""


def enlarge(folder: Path, sizes: dict[str, int]) -> None:
    """Makes a small Llama checkpoint a large one in bfloat16, without ever holding it."""
    config = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    old = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64}
    grown = {before: sizes[key] for key, before in old.items()}
    shapes = {name: [grown[size] for size in tensor.shape] for name, tensor in tensors_of(folder).items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    noise = np.random.default_rng(0).integers(0x3C00, 0x3D00, 1_000_003, np.uint16).tobytes()  # no two tensors alike
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while (left := 8 + len(text) + end - file.tell()) > 0:
            file.write(noise[:left])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to measure the memory of a process")
def test_memory_stays_small_whatever_the_models_size(tmp_path: Path) -> None:
    """A target of 0.6 GB in bfloat16, 1.2 GB in the bundle."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    target = write_target(tmp_path / "target", num_hidden_layers=14, **heads)
    sizes = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096}
    enlarge(target, sizes | {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64})
    command = [sys.executable, "-c", MEASURE, str(target), str(tmp_path / "bundle")]
    peak = 1024 * int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (tmp_path / "bundle" / "weights.bin").stat().st_size > 1.1e9
    assert peak < 1.5 * 4 * sizes["vocab_size"] * sizes["hidden_size"] + 400e6
